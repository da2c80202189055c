"""Which quantity of a run is no longer finite, and which step size to look at."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Shared
from bilevax._problem.view import each_block
from bilevax._step.slot_table import SlotTable
from bilevax._step.slots import gather
from bilevax._step.state import Along, State
from bilevax._util.trees import PyTree, all_finite, where_slot, zeros_like

_REMEDY = {
    "s": "lower_step",
    "y": "lower_step",
    "u": "inverse_step",
    "v": "inverse_step",
    "mean": "alpha, gamma and upper_step",
    "H": "lower_step, and floor",
    "z": "upper_step, and beta",
    "x": "upper_step",
}


def describe(problem: Problem, state: State, first: int, last: int) -> str:
    """A sentence on what is not finite: a row of the data if there is one, else a tracked quantity."""
    slots = _out_of_range(problem, state)
    if slots:
        return f"the run ended between steps {first} and {last}: {slots}"
    row = _bad_data(problem)
    if row:
        return f"the run diverged between steps {first} and {last}: {row}; mend or leave out such rows"
    left = _outside_domain(problem, state)
    if left:
        return f"the run diverged between steps {first} and {last}: {left}"
    return _describe(state, first, last)


def _describe(state: State, first: int, last: int) -> str:
    """A sentence on the quantity that went wrong first, at the step where f was no longer finite.

    If x was not finite one step earlier, it is x. Otherwise a block makes z and x non-finite within one step,
    so blocks are named before them. If f overflowed while all its arguments are finite, the largest is
    named. Where x and blocks are both gone, and it is not known which of them went first, none of them is
    named: x one step earlier cannot be had from a z that is not finite, and accelerators stop a run some
    steps late.

    Args:
      state: the state at that step.
      first: the first step of the range in which the trouble arose.
      last: the last one.
    """
    blocks = [
        (letter, name, tree) for name, memory in state.levels.items() for letter, tree in memory.parts()
    ]
    broken: list[Any] = [(letter, name, *map(int, _bad_slots(tree))) for letter, name, tree in blocks]
    broken = [one for one in broken if one[-1]]
    where, how = "", "is not finite"
    # After a plain step, x before cannot be told from a z that is not finite; unless the step was not.
    lost = isinstance(state.back, Along) and _finite(state.back) and not _finite(state.z)
    late = jax.default_backend() != "cpu"
    unclear = late or (lost and not _moved(state, broken))
    if last > 1 and broken and unclear and not _finite((state.x, state.z)):
        return (
            f"the run diverged between steps {first} and {last}: x and {max(one[-1] for one in broken)} "
            f"blocks are not finite{', up to 31 steps after f was not' if late else ''}; "
            "look at upper_step and lower_step, or start from smaller ones"
        )
    if not lost and state.x_before is not None and not _finite(state.x_before):
        letter = "x"
    elif broken:
        letter, name, worst, count = broken[0]
        where = f" of block {worst} (lower level {name!r}, {count} blocks in all)"
    elif not _finite((state.x, state.z)):
        letter = "x" if _finite(state.z) else "z"
    else:
        candidates = [(float(_largest(tree)), letter, name) for letter, name, tree in blocks]
        candidates += [(float(_largest(state.z)), "z", ""), (float(_largest(state.x)), "x", "")]
        size, letter, name = max(candidates)
        where = f" of lower level {name!r}" if name else ""
        how = f"has grown to {size:.1e}"
    if last <= 1:
        return (
            f"f is not finite at the start: {letter}{where} {how} after one step; look at x0, y0 and the data"
        )
    return (
        f"the run diverged between steps {first} and {last}: {letter}{where} {how}; "
        f"look at {_REMEDY[letter]}, or start from a smaller one"
    )


def _out_of_range(problem: Problem, state: State) -> str:
    """Which level's slots were out of range in the last steps, if any were."""
    if all(level.slots is None for level in problem.levels.values()):
        return ""
    for back in range(1, 33):  # an accelerator stops up to 31 steps late
        sample = state.sampler.draw(problem, state.step - back)
        for name, level in problem.levels.items():
            slots, count = np.asarray(sample.slots[name]), problem.slots_of(name)
            wrong = slots[(slots < 0) | (slots >= count)]
            if level.slots is not None and wrong.size:
                return (
                    f"slots of lower level {name!r} must return integers from 0 to {count - 1} (count = "
                    f"{count}), got {wrong[0]}"
                )
    return ""


def _outside_domain(problem: Problem, state: State) -> str:
    """Which tracked mean f is not finite at, although it is at a sample of that mean; nothing if none."""
    leaves = jax.tree.leaves((problem, state))
    means = [name for name, level in problem.levels.items() if not level.has_hessian]
    own_slots = any(level.slots is not None for level in problem.levels.values())
    known = all(isinstance(state.levels[name], SlotTable) for name in means)
    if not means or not known or own_slots or not all(leaf.is_fully_addressable for leaf in leaves):
        return ""
    # After a plain step x before is lost with z; f of a mean often does not read x.
    x = next((x for x in (state.x_before, state.x) if x is not None and _finite(x)), zeros_like(state.x))
    sample = state.sampler.draw(problem, state.step - 1)
    stored = dataclasses.replace(state, centres=()).y
    y = gather(problem.split("y", stored), sample.blocks)
    y |= {name: _before_refresh(state, name, sample.blocks) for name in means}
    seen = {n: each_block(problem, x, sample, lambda view, n=n: view.c(n)) for n in means}

    def is_finite(y: dict[str, PyTree]) -> np.ndarray:
        return np.isfinite(np.asarray(each_block(problem, x, sample, lambda view, y: view.f(y), y)))

    bad = ~is_finite(y)
    for name in means:
        for place in map(int, np.flatnonzero(bad & is_finite(y | {name: seen[name]}))):
            tracked, fresh = (_entries(tree[name], place) for tree in (y, seen))
            if np.isfinite(tracked).all():
                return (
                    f"f is not finite at the tracked mean of lower level {name!r} in block "
                    f"{int(sample.blocks[place])}, {_short(tracked)}, although it is at a sample of it, "
                    f"{_short(fresh)}: give bx.mean the bounds that f needs (lower=…, upper=…)"
                )
    return ""


def _before_refresh(state: State, name: str, blocks: Any) -> PyTree:
    """The tracked mean of some blocks that f saw in the last step."""
    rows = state.levels[name].take(blocks)
    return (
        rows.y if rows.previous is None else where_slot(rows.visit == state.step - 1, rows.previous, rows.y)
    )


def _entries(tree: PyTree, place: int) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf)[place]) for leaf in jax.tree.leaves(tree)])


def _short(entries: np.ndarray) -> str:
    """Some numbers, as far as a line holds them."""
    return ", ".join(f"{entry:.3g}" for entry in entries[:4]) + (", …" if entries.size > 4 else "")


def _bad_data(problem: Problem) -> str:
    """Where the data hold a value that is not finite; nothing if nowhere."""
    sources = {"blocks": problem.blocks, "upper_data": problem.upper_data}
    sources |= {f"lower_data {place}": rows for place, rows in enumerate(problem.lower_data)}
    if len(problem.lower_data) == 1:
        sources["lower_data"] = sources.pop("lower_data 0")
    for name, tree in sources.items():
        rows = tree.rows if isinstance(tree, (Shared, PerBlock)) else tree
        for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
            if jnp.issubdtype(leaf.dtype, jnp.floating) and not _finite(leaf):
                row, count = map(int, _bad_slots(leaf))
                where = f"{name}{jax.tree_util.keystr(path)}"
                others = f", and {count - 1} other rows" if count > 1 else ""
                return f"row {row} of {where} is not finite{others}"
    return ""


def _moved(state: State, broken: list[Any]) -> bool:
    """Whether a block's variable was not finite when this step began; what is not lazy moves in the step."""
    lazy = {(letter, name) for name, memory in state.levels.items() for letter in memory.lazy}
    return any((letter, name) in lazy for letter, name, *_ in broken)


@jax.jit
def _largest(tree: PyTree) -> Any:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(a)) for a in jax.tree.leaves(tree)]))


@jax.jit
def _bad_slots(tree: PyTree) -> tuple[Any, Any]:
    """The first slot that is not finite, and how many are not."""
    leaves = [jnp.any(~jnp.isfinite(a), axis=tuple(range(1, a.ndim))) for a in jax.tree.leaves(tree)]
    bad = jnp.any(jnp.stack(leaves), axis=0)
    return jnp.argmax(bad), jnp.sum(bad)


_all_finite = jax.jit(all_finite)


def _finite(tree: PyTree) -> bool:
    return bool(_all_finite(tree))
