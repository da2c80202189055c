"""The exact F of some blocks, the same ones for every x that is compared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.risk import overall, weights_of
from bilevax._step.slots import gather
from bilevax._truth.few_blocks import affordable_blocks, solve_few
from bilevax._util.trees import PyTree, all_finite

_BLOCKS = 64
_BLOCKS_OF_A_RISK = 512  # a few blocks say nothing about a tail or a rare group
_LEFT = 0.005  # of F, by which a further Newton step may change it
_RISE = 0.02  # of F, by which it may be above that at the start


class Judge:
    """Solves some blocks on all their rows, at the x of a run and at the first x.

    Args:
      problem: the problem.
      key: draws the blocks.
      count: how many; left out, 64, or all if there are fewer, or fewer if they have many rows; 512 under a
        risk.
      x0: the first x.
      y0: lower variables from where its blocks are solved.

    Attributes:
      blocks: the numbers of the blocks, in order.
      start: F at the first x; NaN if its blocks cannot be solved.
    """

    def __init__(self, problem: Problem, key: Array, count: int | None, x0: PyTree, y0: PyTree):
        self.problem = problem.without_centres()
        at_once = max(1, affordable_blocks(self.problem, _BLOCKS))
        most = at_once if problem.risk is None else max(at_once, _BLOCKS_OF_A_RISK)
        drawn = jax.random.permutation(key, problem.count)[: most if count is None else count]
        self.blocks, self.start = np.sort(np.asarray(drawn)), np.nan
        self._groups = np.array_split(self.blocks, -(-len(self.blocks) // at_once))
        self._first = self._values(x0, y0)
        self.start = self._overall(self._first)

    def __call__(self, x: PyTree, y: PyTree) -> float:
        """The mean of f_i(x, y_i(x)) over the blocks, or their risk; NaN if they cannot be solved from y."""
        return self._overall(self._values(x, y))

    def worse_than_start(self, x: PyTree, y: PyTree) -> bool:
        """Whether F is larger than at the first x, by more than the choice of the blocks can account for."""
        values = self._values(x, y)
        if self.problem.risk is not None and len(values) < self.problem.count:
            return False  # the worst blocks may not be among these
        change = self._weighed(values) - self._weighed(self._first)
        noise = 0.0 if len(change) == self.problem.count else float(np.std(change)) / len(change) ** 0.5
        return self._overall(values) - self.start > max(_RISE * abs(self.start), 2 * noise)

    def _overall(self, values: np.ndarray) -> float:
        return float(overall(self.problem.risk, values, self.blocks))

    def _weighed(self, values: np.ndarray) -> np.ndarray:
        """The part of each block in the objective."""
        weights = weights_of(self.problem.risk, values, self.blocks)
        return values if weights is None else values * np.asarray(weights)

    def _values(self, x: PyTree, y: PyTree) -> np.ndarray:
        """f_i(x, y_i(x)) of every block, all NaN if they cannot be solved."""
        nothing = np.full(len(self.blocks), np.nan)
        if not bool(all_finite((x, y))):
            return nothing
        by_level = self.problem.split("y", y)
        found = [
            solve_few(self.problem, x, gather(by_level, blocks), dict.fromkeys(by_level), blocks)
            for blocks in map(jnp.asarray, self._groups)
        ]
        values = np.concatenate([np.asarray(one.value, np.float64) for one in found])
        left = np.mean(np.concatenate([np.asarray(one.left, np.float64) for one in found]))
        mean = np.mean(values)
        solved = np.isfinite(mean) and left <= _LEFT * np.fmax(abs(mean), abs(mean - self.start))
        return values if solved else nothing
