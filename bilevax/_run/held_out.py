"""A sample of the blocks to search on, and other blocks that judge what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._run.descent import Exact
from bilevax._step.state import State
from bilevax._truth.few_blocks import solve_at
from bilevax._util.trees import PyTree

_CLEARLY = 2.0  # standard errors
_LEFT = 0.005  # of the mean |f|, by which a further Newton step may change f where blocks count as solved


class Division(NamedTuple):
    """Blocks to search on, and others to judge on; no others if all are searched."""

    searched: np.ndarray
    judges: np.ndarray


class Change(NamedTuple):
    """The mean of F_i over the judges at two x."""

    before: float
    after: float


def divided(count: int, size: int) -> Division:
    """So many blocks of all, and as many others, the same in every run."""
    if size >= count:
        return Division(np.arange(count), np.arange(0))
    shuffled = np.random.default_rng(0).permutation(count)
    return Division(np.sort(shuffled[:size]), np.sort(shuffled[size : 2 * size]))


def judged(judges: Exact, before: PyTree, after: PyTree) -> Change | None:
    """What F is on other blocks; None if it is not clearly less than before.

    Where some of them cannot be solved before, F is NaN there, and whatever can be solved is better.
    """
    old, new = (judges(judges.flat(x), judges.tracked) for x in (before, after))
    if new is None:
        return None
    if old is None:
        return Change(np.nan, new.value)
    change = np.asarray(new.truth.value, np.float64) - np.asarray(old.truth.value, np.float64)
    error = change.std() / len(change) ** 0.5
    return Change(old.value, new.value) if change.mean() < -_CLEARLY * error else None


def solved_everywhere(
    problem: Problem, x: PyTree, state: State, size: int, is_over: Callable[[], bool]
) -> dict[str, PyTree] | None:
    """y(x) of all blocks, so many at once; None if they cannot be solved, or there is no time."""
    parts, left, scale = [], 0.0, 0.0
    for first in range(0, problem.count, size):
        if is_over():
            return None
        blocks = np.arange(first, first + size) % problem.count  # all of one shape, for one program
        new = min(size, problem.count - first)
        truth = solve_at(problem, x, state, jnp.asarray(blocks))
        left += float(jnp.sum(truth.left[:new]))
        scale += float(jnp.sum(jnp.abs(truth.value[:new])))
        parts.append(jax.tree.map(lambda leaf, new=new: np.asarray(leaf[:new]), truth.y))
    if not left <= _LEFT * scale:
        return None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
