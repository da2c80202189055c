"""Which quantity of a run is no longer finite, and which step size to look at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.memory import Memory, Moving
from bilevax.solvers.state import State
from bilevax.trees import PyTree

_REMEDY = {
    "s": "lower_step",
    "y": "lower_step",
    "u": "inverse_step",
    "v": "inverse_step",
    "H": "lower_step, and floor",
    "z": "upper_step, and beta",
    "x": "upper_step",
}


def describe(state: State, first: int, last: int) -> str | None:
    """A sentence on the first quantity that is not finite; None if all are.

    Blocks come before z and x, which a single bad block spoils: if x was still finite one step earlier, a
    block went first.

    Args:
      state: the state at the step where the trouble showed.
      first: the first step of the range in which it arose.
      last: the last one.
    """
    blocks = [found for name, memory in state.levels.items() for found in _blocks(name, memory)]
    upper = [name for name, tree in (("x", state.x), ("z", state.z)) if not _finite(tree)]
    spoiled = state.x_before is not None and not _finite(state.x_before)
    if blocks and not spoiled:
        letter, where = blocks[0]
    elif upper:
        letter, where = upper[-1], ""
    elif blocks:
        letter, where = blocks[0]
    else:
        return None
    return (
        f"the run diverged between steps {first} and {last}: {letter}{where} is not finite; "
        f"look at {_REMEDY[letter]}, or start from a smaller one"
    )


def _blocks(name: str, memory: Any) -> list[tuple[str, str]]:
    """The letters of a level's quantities that are not finite, each with the first block."""
    parts: list[tuple[str, PyTree]] = []
    if isinstance(memory.y, Moving):
        parts += [("s", memory.y.slope), ("y", memory.y.value)]
    else:
        parts += [("y", memory.y)]
    if isinstance(memory, Memory):
        parts += [("u", memory.v.slope), ("v", memory.v.value)] if memory.v is not None else []
        parts += [("H", memory.hessian)] if memory.hessian is not None else []
    else:
        parts += [("H", memory.pieces)]
    found = []
    for letter, tree in parts:
        bad = np.flatnonzero(_bad_slots(tree))
        if bad.size:
            found.append((letter, f" of block {bad[0]} (lower level {name!r}, {bad.size} blocks in all)"))
    return found


@jax.jit
def _bad_slots(tree: PyTree) -> Any:
    leaves = [jnp.any(~jnp.isfinite(a), axis=tuple(range(1, a.ndim))) for a in jax.tree.leaves(tree)]
    return jnp.any(jnp.stack(leaves), axis=0)


@jax.jit
def _all_finite(tree: PyTree) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(tree)]))


def _finite(tree: PyTree) -> bool:
    return bool(_all_finite(tree))
