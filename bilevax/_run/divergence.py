"""Which quantity of a run is no longer finite, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.finite import bad_batch, not_finite
from bilevax._problem.lookups import part_of
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import is_streamed
from bilevax._problem.view import each_block
from bilevax._run.knobs import Knobs, is_number, rounded, shown
from bilevax._step.slot_table import SlotTable
from bilevax._step.slots import gather
from bilevax._step.state import Along, State
from bilevax._util.trees import PyTree, all_finite, where_slot, zeros_like
from bilevax.solvers.base import AbstractSolver

# By the letter of what is not finite, the hyper-parameters to look at: the first that the solver has.
_REMEDY = {
    "s": ("lower_step", "alpha", "upper_step"),
    "y": ("lower_step", "alpha", "upper_step"),
    "u": ("inverse_step", "lower_step", "alpha", "upper_step"),
    "v": ("inverse_step", "lower_step", "alpha", "upper_step"),
    "H": ("lower_step", "alpha", "upper_step"),
    "mean": ("upper_step",),
    "z": ("upper_step",),
    "x": ("upper_step",),
}


def describe(
    problem: Problem,
    solver: AbstractSolver,
    state: State,
    first: int,
    last: int,
    advise: Callable[[], str] = lambda: "",
) -> str:
    """A sentence on what is not finite, and what to do about it.

    It is a row of the data if there is one, else a tracked quantity.

    Args:
      problem: the problem.
      solver: the solver.
      state: the state at the step where f, x or a tracked quantity was no longer finite.
      first: the first step of the range in which the trouble arose.
      last: the last one.
      advise: which hyper-parameter to look at, found by experiment; an empty text if that is not known.
    """
    known = fault(problem, state, first, last)
    if known:
        return known
    letters, what = _not_finite(state.settled, last)
    if last <= 1:
        values = any(level.is_value for level in problem.levels.values())
        hint = "; leave y0 of a bx.mean out, and the run begins at its value" if values else ""
        return f"f is not finite at the start: {what} after one step; look at x0, y0 and the data{hint}"
    return (
        f"the run diverged between steps {first} and {last}: {what}; {advise() or _remedy(solver, letters)}"
    )


def fault(problem: Problem, state: State, first: int, last: int) -> str:
    """What no other step would mend: slots out of range, a row of the data, f outside of its domain."""
    state = state.settled
    slots = _out_of_range(problem, state)
    if slots:
        return f"the run ended between steps {first} and {last}: {slots}"
    batch = bad_batch(problem, last)
    if batch:
        return f"the run diverged between steps {first} and {last}: {batch}"
    bad = next(not_finite(problem), None)
    if bad is not None:
        return f"the run diverged between steps {first} and {last}: {bad}; mend or leave out such rows"
    left = _outside_domain(problem, state)
    return f"the run diverged between steps {first} and {last}: {left}" if left else ""


def _remedy(solver: AbstractSolver, letters: list[str]) -> str:
    """Which hyper-parameters to look at, by the letters of what is not finite alone."""
    knobs = Knobs(solver)
    names = [next((name for name in _REMEDY[letter] if name in knobs), "") for letter in letters]
    names = list(dict.fromkeys(name for name in names if name))
    if not names:
        return "start from another x0, or use less noise"
    values = {name: knobs.values[name] for name in names}
    used = " and ".join(
        f"{name} (left out)" if value is None else f"{name} ({shown(value)})"
        for name, value in values.items()
    )
    numbers = {name: value for name, value in values.items() if value is not None and is_number(value)}
    smaller = ", ".join(f"{name}={rounded(0.1 * float(value)):g}" for name, value in numbers.items())
    text = f"look at {used}, or start from a smaller one"
    text += f", such as {smaller}" if smaller else ""
    return text + (
        "; or leave upper_step out: bx.automatic_step() then moves x" if "upper_step" in numbers else ""
    )


def _not_finite(state: State, last: int) -> tuple[list[str], str]:
    """The letters of what went wrong first, and a clause on it, at the step where f was no longer finite.

    If x was not finite one step earlier, it is x. Otherwise a block makes z and x non-finite within one step,
    so blocks are named before them. If f overflowed while all its arguments are finite, the largest is
    named. Where x and blocks are both gone, and it is not known which of them went first, both are named: x
    one step earlier cannot be had from a z that is not finite, and accelerators stop a run some steps late.
    """
    blocks = [
        (letter, name, tree) for name, memory in state.levels.items() for letter, tree in memory.parts()
    ]
    broken: list[Any] = [(letter, name, *map(int, _bad_slots(tree))) for letter, name, tree in blocks]
    broken = [one for one in broken if one[-1]]
    # After a plain step, x before cannot be told from a z that is not finite; unless the step was not.
    lost = isinstance(state.back, Along) and _finite(state.back) and not _finite(state.z)
    late = jax.default_backend() != "cpu"
    unclear = late or (lost and not _moved(state, broken))
    if last > 1 and broken and unclear and not _finite((state.x, state.z)):
        count = max(one[-1] for one in broken)
        delay = ", up to 31 steps after f was not" if late else ""
        return ["x", broken[0][0]], f"x and {count} blocks are not finite{delay}"
    if not lost and state.x_before is not None and not _finite(state.x_before):
        return ["x"], "x is not finite"
    if broken:
        letter, name, worst, count = broken[0]
        where = f"of block {worst} (lower level {name!r}, {count} blocks in all)"
        return [letter], f"{letter} {where} is not finite"
    if not _finite((state.x, state.z)):
        letter = "x" if _finite(state.z) else "z"
        return [letter], f"{letter} is not finite"
    candidates = [(float(_largest(tree)), letter, name) for letter, name, tree in blocks]
    candidates += [(float(_largest(state.z)), "z", ""), (float(_largest(state.x)), "x", "")]
    size, letter, name = max(candidates)
    return [letter], f"{letter}{f' of lower level {name!r}' if name else ''} has grown to {size:.1e}"


def _out_of_range(problem: Problem, state: State) -> str:
    """Which level's slots, or rows of a table, were out of range in the last steps, if any were."""
    # Streamed rows are not there any more.
    tables = () if is_streamed(problem) else problem.tables
    if all(level.slots is None for level in problem.levels.values()) and not tables:
        return ""
    sizes = {name: part_of(state.x, name).shape[0] for name, _ in tables}
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
        for name, rows in sizes.items():
            found = [np.asarray(at) for at in sample.lookups[name].values()]
            wrong = np.concatenate([at[(at < 0) | (at >= rows)] for at in found])
            if wrong.size:
                label = f"tables[{name!r}]" if name else "tables"
                return f"{label} must return row numbers from 0 to {rows - 1}, got {wrong[0]}"
    return ""


def _outside_domain(problem: Problem, state: State) -> str:
    """Which tracked mean f is not finite at, although it is at a sample of that mean; nothing if none."""
    leaves = jax.tree.leaves((problem, state))
    means = [name for name, level in problem.levels.items() if level.is_value]
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
    seen = {n: each_block(problem, x, sample, lambda view, y, n=n: view.c(n, y), y) for n in means}

    def is_finite(y: dict[str, PyTree]) -> np.ndarray:
        return np.isfinite(np.asarray(each_block(problem, x, sample, lambda view, y: view.f(y), y)))

    bad = ~is_finite(y)
    for name in means:
        for place in map(int, np.flatnonzero(bad & is_finite(y | {name: seen[name]}))):
            tracked, fresh = (_entries(tree[name], place) for tree in (y, seen))
            overflown = np.finfo(tracked.dtype).max ** 0.4  # so large a mean has diverged itself
            if np.isfinite(tracked).all() and np.abs(tracked).max() < overflown:
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
