"""The steps of a diverged run once more, with another solver: what would have helped is tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._run.chunks import compiled_chunk, numbers_as_arrays
from bilevax._run.sharding import Shards
from bilevax._step.state import State
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver

_LEAST = 100  # steps of each part of a replay
_GROWN = 10.0  # the growth from the first to the second part that is a divergence
_HALVINGS = 6


class TooLongError(Exception):
    """Another replay would take too long."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a replay showed.

    Attributes:
      stable: whether it stayed finite, and did not begin to grow.
      objective: the mean of f in its second part.
      falls: whether f was less there than in the first part.
      x: where x ended.
    """

    stable: bool
    objective: float
    falls: bool
    x: PyTree


class Replays:
    """Runs from the same start, on the same samples, for half as many steps again as until the divergence.

    Args:
      problem: the problem.
      begin: the state before the first step of a solver.
      steps: after how many steps the run had diverged.
      most: how many steps all replays together may take.
      shards: the devices that share the blocks, if they are several.
      work: that of the run, so that the same program serves.
    """

    def __init__(
        self,
        problem: Problem,
        begin: Callable[[AbstractSolver], State],
        steps: int,
        most: float,
        shards: Shards | None,
        work: float,
    ):
        self.problem, self.begin, self.steps, self.shards = problem, begin, steps, shards
        self.work = work
        self.length, self.left = max(steps, _LEAST), most

    def run(self, solver: AbstractSolver, state: State | None = None, *, at_rest: bool = False) -> Trial:
        """The two parts of a replay, from a state or from the start.

        Variables that grow are no divergence if f falls meanwhile; unless x is `at_rest`.
        """
        more = max(self.length // 2, _LEAST)
        self._reserve(self.length + more)
        solver = numbers_as_arrays(solver)
        begun: State = self.begin(solver) if state is None else jax.tree.map(jnp.copy, state)
        first, f_first = self._chunk(solver, begun, self.length)
        before = _sizes(first)
        last, f_last = self._chunk(solver, first, more)
        after = _sizes(last)
        finite = bool(np.isfinite([f_first, f_last, *before, *after]).all())
        grows = bool(np.any(after > _GROWN * before))
        falls = f_last < f_first
        return Trial(finite and (not grows or (falls and not at_rest)), f_last, falls, last.settled.x)

    def last_healthy(self, solver: AbstractSolver) -> State:
        """The state shortly before the run began to diverge: f and z are within ten times the first ones."""
        self._reserve(self.steps)
        solver = numbers_as_arrays(solver)
        state = self.begin(solver)
        slope, value, piece = float(_size(state.settled.z)), 0.0, self.steps
        for _ in range(_HALVINGS):
            piece = max(1, piece // 2)
            later, f = self._chunk(solver, jax.tree.map(jnp.copy, state), piece)
            value = value or abs(f)
            if abs(f) <= _GROWN * value and float(_size(later.settled.z)) <= _GROWN * slope:
                state = later
        return state

    def _chunk(self, solver: AbstractSolver, state: State, steps: int) -> tuple[State, float]:
        begun = int(state.step)
        state, total = compiled_chunk(
            (solver, self.problem), state, steps, shards=self.shards, work=self.work
        )
        return state, float(total.high) / max(int(state.step) - begun, 1)

    def _reserve(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooLongError


def _sizes(state: State) -> np.ndarray:
    """The largest entry of x, and of every stored variable; slopes may vanish, and differ by any factor."""
    stored = [part for memory in state.levels.values() for part in memory.parts()]
    parts = [tree for letter, tree in stored if letter not in ("s", "u")]
    return np.asarray([float(_size(tree)) for tree in (state.settled.x, *parts)])


@jax.jit
def _size(tree: PyTree) -> Any:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(a)) for a in jax.tree.leaves(tree)])).astype(float)
