"""L-BFGS on F, or on the mean of some F_i, with these blocks solved, in units that it takes from two places.

Its result does not depend on the units of x and F.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.risk import overall
from bilevax._problem.smooth_risk import SmoothRisk, smooth_value
from bilevax._step.slots import gather
from bilevax._step.state import State
from bilevax._truth.few_blocks import Truth, affordable_blocks, solve_few
from bilevax._truth.lower_solve import SMALL
from bilevax._util.trees import PyTree

_MATRICES = 2**26  # numbers in the Hessians of blocks that are solved at once, several times over
_MOST = 500  # evaluations of a search
_LEFT = 0.005  # of F, by which a further Newton step may change it where blocks count as solved
_ITERATIONS = 3  # iterations in which F must still fall
_ENOUGH = 1e-4  # by how much, as a share of its decrease so far, where F is flat
_FLAT = 1e-4  # ‖∇F‖, as a share of the largest one, where F counts as flat
_STUCK = 1e-6  # by how much F must fall anywhere: a valley may be long
_LITTLE = 1e-5  # the same, as a share of what F has fallen by elsewhere
_SAME = 16  # roundings, by which two values of F may differ and count as the same
_TIMES = 4  # how often in a row F may be the same
# The shares of the decrease of F that came after a part of the search: above the first, or above both.
_LATE, _FALLING = (0.8, 0.5), (0.02, (0.002, 0.01))
_UNSOLVED = 1e3  # F where blocks cannot be solved, in units of the decrease that is expected at first
_HARDLY = 0.03  # of the way of the entry that has gone farthest: the least way that counts
_CHANGED = 0.01  # of ∇F, by which it must have changed on the way of a run to say how F is curved
_FARTHER, _PROBES = 10.0, 12  # how much farther to look where F is the same, and how often
_LEAST = 1e-3  # of the curvature along the entry in the middle: the least that counts
_TINY = 1e-300


class Point(NamedTuple):
    """Where the blocks were solved.

    Attributes:
      at: x, as a vector.
      value: F.
      sought: what a search makes small: F, or what it is with a smooth risk.
      slope: the gradient of that, as a vector.
      values: per block, F_i.
      y: by level, y(x) of these blocks.
    """

    at: np.ndarray
    value: float
    sought: float
    slope: np.ndarray
    values: np.ndarray
    y: dict[str, PyTree]


class Part(NamedTuple):
    """Blocks that are solved at once.

    Attributes:
      places: theirs among all that are searched.
      weights: their weights in the mean; None if there is no other part.
    """

    places: np.ndarray
    weights: Array | None


def at_once(problem: Problem, y: PyTree) -> int:
    """How many blocks can be solved at once; 0 if one has too many rows."""
    entries = sum(leaf[0].size for leaf in jax.tree.leaves(y))
    return affordable_blocks(problem, min(problem.count, _MATRICES // min(entries, SMALL) ** 2))


class Exact:
    """F and ∇F of a vector, or their means over some blocks, which are solved on all their rows.

    Attributes:
      tracked: the lower variables of the run.
      left: how many Newton steps may still be taken.
      count: how often the blocks were solved.
      smooth: a risk to take in place of the problem's own, for what is sought; None for that one.
    """

    def __init__(
        self,
        problem: Problem,
        state: State,
        blocks: np.ndarray,
        newton_steps: int,
        is_over: Callable[[], bool] = lambda: False,
    ):
        self.problem, self.left, self._is_over = problem, newton_steps, is_over
        self.smooth: SmoothRisk | None
        self._blocks, self._parts = jnp.asarray(blocks), _parts(len(blocks), at_once(problem, state.y))
        y, v = problem.split("state.y", state.y), problem.split("state.v", state.v)
        self.tracked = gather(y, self._blocks)
        self._v = {name: None if v[name] is None else gather(v[name], self._blocks) for name in v}
        self._like, self._unravel = state.x, ravel_pytree(state.x)[1]
        self._first: float | None = None  # F at the first place where the blocks were solved
        self.count, self.smooth = 0, None

    def flat(self, x: PyTree) -> np.ndarray:
        """A tree like x as a vector."""
        like = jax.tree.map(lambda a, like: jnp.asarray(a, like.dtype), x, self._like)
        return np.asarray(ravel_pytree(like)[0], np.float64)

    def unflat(self, at: np.ndarray) -> PyTree:
        """A vector as a tree like x."""
        return self._unravel(jnp.asarray(at, ravel_pytree(self._like)[0].dtype))

    def __call__(self, at: np.ndarray, y: Any) -> Point | None:
        """F and ∇F at a place, with blocks solved from y; None if they could not be solved."""
        x, total, smooth = self.unflat(at), len(self._blocks), self.smooth
        problem = self.problem if smooth is None else eqx.tree_at(lambda one: one.risk, self.problem, smooth)
        found = [self._solved(problem, x, y, part) for part in self._parts]
        self.count += 1
        self.left -= max(int(one.steps) for one in found)
        values = np.concatenate([np.asarray(one.value) for one in found])[:total]
        value = float(overall(self.problem.risk, jnp.asarray(values), self._blocks))
        sought = value if smooth is None else float(smooth_value(smooth, jnp.asarray(values)))
        scale = abs(value) if self._first is None else max(abs(value), abs(value - self._first))
        left = float(np.mean(np.concatenate([np.asarray(one.left) for one in found])[:total]))
        slope = sum(self.flat(one.slope) for one in found)
        if not (np.isfinite([value, sought]).all() and np.isfinite(slope).all() and left <= _LEFT * scale):
            return None
        self._first = value if self._first is None else self._first
        y = jax.tree.map(lambda *leaves: _joined(leaves)[:total], *(one.y for one in found))
        return Point(at, value, sought, np.asarray(slope), values, y)

    def _solved(self, problem: Problem, x: PyTree, y: Any, part: Part) -> Truth:
        if part.weights is None:
            return solve_few(problem, x, y, self._v, self._blocks)
        y, v, blocks = jax.tree.map(lambda leaf: leaf[part.places], (y, self._v, self._blocks))
        return solve_few(problem, x, y, v, blocks, part.weights)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.left <= 0 or self._is_over()

    @staticmethod
    def rounding(point: Point) -> float:
        """By how much F at a point may change by rounding."""
        return _SAME * float(np.finfo(point.values.dtype).eps) * abs(point.value)


def _parts(total: int, at_once: int) -> list[Part]:
    """So many blocks in parts of one shape, for one program: the last block is repeated where some lack."""
    count = -(-total // at_once)
    if count == 1:
        return [Part(np.arange(total), None)]
    size = -(-total // count)
    places = np.arange(count * size).reshape(count, size)
    weights = jnp.asarray(np.where(places < total, size / total, 0.0))
    return [Part(np.minimum(one, total - 1), weight) for one, weight in zip(places, weights, strict=True)]


def _joined(leaves: Sequence[Array]) -> Array:
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


class Units:
    """Units of the entries of x in which F is curved alike along all of them, as far as a run shows it.

    The slopes where the run began and ended say how much F is curved along every entry on the way between.
    All entries move at about the same speed, so that one that has hardly moved has come back.
    """

    def __init__(self, start: Point, end: Point):
        way, change = np.abs(end.at - start.at), np.abs(end.slope - start.slope)
        steepest = max(float(np.linalg.norm(start.slope)), float(np.linalg.norm(end.slope)))
        if np.linalg.norm(change) < _CHANGED * steepest:  # rounding: x has not gone anywhere
            change = np.zeros_like(change)
        curvature = change / np.maximum(way, _HARDLY * max(way.max(initial=0.0), _TINY))
        middle = np.median(curvature[curvature > 0]) if (curvature > 0).any() else 1.0
        self.scales = 1 / np.sqrt(np.maximum(curvature, _LEAST * middle))
        self.steepest = self.largest = max(self.norm(start.slope), self.norm(end.slope))
        # As far as a parabola would have to go whose slope has fallen by so much on the way of the run.
        self._way = float(np.linalg.norm(way / self.scales)) or float(np.linalg.norm(start.at / self.scales))

    def norm(self, slope: np.ndarray) -> float:
        """The size of a slope."""
        return float(np.linalg.norm(slope * self.scales))

    def note(self, slope: np.ndarray) -> None:
        """A search has come down such a slope."""
        self.largest = max(self.largest, self.norm(slope))

    def share(self, slope: np.ndarray) -> float:
        """The size of a slope, as a share of the largest one so far."""
        return self.norm(slope) / self.largest if self.largest > 0 else 1.0

    def length(self, point: Point) -> float:
        """How far to go at first from a point."""
        return (self._way or 1.0) * self.norm(point.slope) / self.steepest if self.steepest > 0 else 0.0


class _EnoughError(Exception):
    """The search is over."""


class Search:
    """L-BFGS from a point.

    Args:
      exact: F.
      first: where to begin.
      units: of x.
      fallen: by how much F has fallen elsewhere: a small share of that is too little to go on for.

    Attributes:
      best: the point with the least F so far.
      lowest: that with the least of what is sought.
      was_cut: whether it was ended while it still searched.
    """

    def __init__(self, exact: Exact, first: Point, units: Units, fallen: float = 0.0):
        self._exact, self._first, self._units, self._fallen = exact, first, units, fallen
        self.best, self.lowest, self.was_cut = first, first, False
        self._bests: list[float] = []
        self._unit = units.length(first)
        self._unit_of_value = units.norm(first.slope) * self._unit
        self._same = 0

    def run(self) -> None:
        """Searches until nothing more is found, or the time is over."""
        if 0 < self._unit_of_value < np.inf:
            with contextlib.suppress(_EnoughError):
                self._find_unit()
                self._descend()

    def _descend(self) -> None:
        from scipy.optimize import minimize  # a dependency of JAX

        seen = [self.lowest.sought]

        def after_iteration(_: Any) -> None:
            seen.append(self.lowest.sought)
            gained = np.inf if len(seen) <= _ITERATIONS else seen[-1 - _ITERATIONS] - seen[-1]
            flat = self._units.norm(self.lowest.slope) <= _FLAT * self._units.steepest
            fallen = self._first.sought - self.lowest.sought
            if gained <= max((_ENOUGH if flat else _STUCK) * fallen, _LITTLE * self._fallen):
                raise _EnoughError

        # Its own criteria are in units of F and x.
        options = {"maxiter": 2 * _MOST, "maxfun": 2 * _MOST, "ftol": 0.0, "gtol": 0.0}
        start = np.zeros_like(self._first.at)
        minimize(self._look, start, jac=True, method="L-BFGS-B", callback=after_iteration, options=options)

    def _find_unit(self) -> None:
        """Looks farther down the first slope, until F changes by more than rounding."""
        downhill = -self._first.slope * self._units.scales
        downhill /= np.linalg.norm(downhill)
        for _ in range(_PROBES):
            self._look(downhill)
            if self._same == 0:
                return
            self._unit, self._unit_of_value = _FARTHER * self._unit, _FARTHER * self._unit_of_value
            self._same = 0

    def falling(self, fallen: float) -> float:
        """The share of a decrease of F that came last, if the search was cut, and it is large."""
        if not (self.was_cut and self._bests and fallen > 0):
            return 0.0
        before = (self._bests[max(int(part * len(self._bests)) - 1, 0)] for part in _LATE)
        last, half = ((value - self.best.value) / fallen for value in before)
        if last > _FALLING[0]:
            return last
        return half if last > _FALLING[1][0] and half > _FALLING[1][1] else 0.0

    def _look(self, at: np.ndarray) -> tuple[float, np.ndarray]:
        """F and ∇F at a place, in the units of the search and beside where it began."""
        if self._exact.is_over or len(self._bests) >= _MOST:
            self.was_cut = True
            raise _EnoughError
        scales = self._unit * self._units.scales
        found = self._exact(self._first.at + scales * at, self.lowest.y)
        self._bests.append(self.best.value)
        if found is None:
            return _UNSOLVED, np.zeros_like(at)
        change = abs(found.sought - self.lowest.sought)
        self._same = self._same + 1 if change <= self._exact.rounding(found) else 0
        if found.value < self.best.value:
            self.best = found
        if found.sought < self.lowest.sought:
            self.lowest = found
            self._units.note(found.slope)
        if self._same >= _TIMES:
            raise _EnoughError
        value = (found.sought - self._first.sought) / self._unit_of_value
        return value, found.slope * scales / self._unit_of_value
