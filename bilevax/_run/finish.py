"""Exact steps at the end of a run whose blocks can all be solved: L-BFGS from where the run has ended.

A run follows x with lower variables that lag behind, and with steps that shrink. It comes near a minimum of
F, and what is left is slow. Where all blocks together are so small that to solve them is a small part of the
work of a run, F and ∇F can be had exactly, and some quasi-Newton steps do what thousands of steps would. F
falls from each to the next, so that the answer is never worse than without.

The search works in units that it takes from the run: its result does not depend on those of x and F.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.risk import overall
from bilevax._step.slots import gather
from bilevax._step.state import State
from bilevax._truth.few_blocks import Truth, affordable_blocks, solve_few, work_of_a_newton_step
from bilevax._util.trees import PyTree

_SHARE = 0.5  # of the work of a run, at most
_CHEAP = 2**30  # numbers read, up to which the work of the run does not matter
_FEWEST = 25  # Newton steps of all blocks, which are worth a try
_MOST = 200  # evaluations
_LEFT = 0.005  # of F, by which a further Newton step may change it
_ITERATIONS = 3  # in which F must still fall
_ENOUGH = 1e-4  # of its decrease so far
_FLAT = 1e-4  # ‖∇F‖, as a share of the largest one, below which that is asked
_STEEP = 0.1  # the same, above which x is no stationary point
_STUCK = 1e-6  # of its decrease so far, whatever ∇F is: a valley may be long
_SAME, _TIMES = 16, 4  # roundings, by which F differs from the least one, so many times in a row
_FALLING, _LATE = 0.02, 0.8  # of the decrease of F, after so large a part of the evaluations
_AGREE = 0.1  # of the decrease, by which F may differ if the blocks are solved from elsewhere
_UNSOLVED = 1e3  # times the decrease that is expected at first: F where blocks cannot be solved
_HARDLY = 0.03  # of the way of the entry that has gone farthest
_CHANGED = 0.01  # of ∇F, by which it must have changed on the way of a run to say how F is curved
_FARTHER, _PROBES = 10.0, 12  # how much farther to look where F is as here, and how often
_LEAST = 1e-3  # of the curvature along the entry in the middle
_TINY = 1e-300


@dataclasses.dataclass(frozen=True)
class Finish:
    """What exact steps at the end of a run have done.

    Attributes:
      evaluations: how often F and ∇F were computed, with all blocks solved on all their rows.
      before: F where the run had ended; where it had begun, if F has no value at the end.
      after: F at the x that is returned; `before` if nothing less was found.
      slope: ‖∇F‖ at the x that is returned, as a share of the larger one of those where the run began and
        ended; entries of x are measured in units of their own.
      falling: the share of the decrease of F that came last, if F still fell fast when the evaluations were
        used up; else 0.
    """

    evaluations: int
    before: float
    after: float
    slope: float
    falling: float

    def __str__(self) -> str:
        return f"{self.evaluations} exact evaluations took F from {self.before:.4g} to {self.after:.4g}"

    @property
    def is_steep(self) -> bool:
        """Whether F is still steep where nothing less was found."""
        return self.slope > _STEEP

    def doubt(self, steps: int) -> str:
        """What to say if x is still on its way after a run of some steps; else nothing."""
        if not self.falling:
            return ""
        return (
            f"x is still on its way: {self.falling:.0%} of the decrease of F came in the last of "
            f"{self.evaluations} exact evaluations: try steps={4 * steps} instead of {steps}"
        )


class Finished(NamedTuple):
    """Where exact steps have led.

    Attributes:
      x: the x with the least F.
      y: y(x).
      report: what was done.
    """

    x: PyTree
    y: PyTree
    report: Finish


def newton_steps_left(problem: Problem, y: PyTree, work: float) -> int:
    """How many Newton steps of all blocks are a small part of the work of a run; 0 if they are too few."""
    if affordable_blocks(problem, problem.count) < problem.count:
        return 0
    count = int(max(_SHARE * work, _CHEAP) // work_of_a_newton_step(problem, y))
    return count if count >= _FEWEST else 0


def finish(
    problem: Problem,
    state: State,
    x0: PyTree,
    newton_steps: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Finished | None:
    """Minimises F with all blocks solved: from the x of a state, and from x0, where F may have other minima.

    Args:
      problem: the problem.
      state: the state of a run at its end.
      x0: where it started.
      newton_steps: of all blocks, at most.
      is_over: whether to stop now, with what was found so far.

    Returns:
      What was found; None if blocks cannot be solved, neither where the run began nor where it ended, or not
      uniquely.
    """
    exact = _Exact(problem.without_centres(), state.settled, newton_steps, is_over)
    places = (exact(exact.flat(x), exact.tracked) for x in (state.settled.x, x0))
    known = [place for place in places if place is not None]
    if not known:
        return None
    units = _Units(known[-1], known[0])
    searches = [_Search(exact, place, units) for place in known]
    for search in searches:
        with contextlib.suppress(_EnoughError):
            search.run()
    evaluations = sum(search.count for search in searches)
    for search in sorted(searches, key=lambda one: one.best.value):
        best, gained = search.best, known[0].value - search.best.value
        # From other starts: what is not unique, or no solution at all, is not to be trusted.
        others = [exact(best.at, y) for y in (exact.tracked, *(place.truth.y for place in known))]
        off = [abs(other.value - best.value) for other in others if other is not None]
        if not (gained >= 0 and off and max(off) <= max(_AGREE * gained, exact.rounding(best))):
            continue
        fallen = max(place.value for place in known) - best.value
        falling = 0.0 if exact.left > 0 else search.falling(fallen)
        slope = units.norm(best.slope) / units.steepest if units.steepest > 0 else 0.0
        report = Finish(evaluations, known[0].value, best.value, slope, falling)
        return Finished(exact.unflat(best.at), problem.view(best.truth.y), report)
    return None


class _Point(NamedTuple):
    """Where all blocks were solved.

    Attributes:
      at: x, as a vector.
      value: F.
      slope: ∇F, as a vector.
      truth: all that belongs to it.
    """

    at: np.ndarray
    value: float
    slope: np.ndarray
    truth: Truth


class _Exact:
    """F and ∇F of a vector, with all blocks solved on all their rows.

    Attributes:
      tracked: the lower variables of the run.
      left: how many Newton steps may still be taken.
    """

    def __init__(self, problem: Problem, state: State, newton_steps: int, is_over: Callable[[], bool]):
        self.problem, self.left, self._is_over = problem, newton_steps, is_over
        self._blocks = jnp.arange(problem.count)
        y, v = problem.split("state.y", state.y), problem.split("state.v", state.v)
        self.tracked = gather(y, self._blocks)
        self._v = {name: None if v[name] is None else gather(v[name], self._blocks) for name in v}
        self._like, self._unravel = state.x, ravel_pytree(state.x)[1]
        self._values: list[float] = []

    def flat(self, x: PyTree) -> np.ndarray:
        """A tree like x as a vector."""
        like = jax.tree.map(lambda a, like: jnp.asarray(a, like.dtype), x, self._like)
        return np.asarray(ravel_pytree(like)[0], np.float64)

    def unflat(self, at: np.ndarray) -> PyTree:
        """A vector as a tree like x."""
        return self._unravel(jnp.asarray(at, ravel_pytree(self._like)[0].dtype))

    def __call__(self, at: np.ndarray, y: Any) -> _Point | None:
        """F and ∇F at a place, with blocks solved from y; None if they could not be solved."""
        found = solve_few(self.problem, self.unflat(at), y, self._v, self._blocks)
        self.left -= int(found.steps)
        value, left = (
            float(overall(self.problem.risk, found.value, self._blocks)),
            float(jnp.mean(found.left)),
        )
        self._values.append(value)
        scale = max(abs(value), abs(value - self._values[0]))
        solved = np.isfinite([value, float(found.gradient)]).all() and left <= _LEFT * scale
        return _Point(at, value, self.flat(found.slope), found) if solved else None

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.left <= 0 or self._is_over()

    @staticmethod
    def rounding(point: _Point) -> float:
        """By how much F at a point may change by rounding."""
        return _SAME * float(jnp.finfo(point.truth.value.dtype).eps) * abs(point.value)


class _Units:
    """Units of the entries of x in which F is curved alike along all of them, as far as a run shows it.

    The slopes where the run began and ended say how much F is curved along every entry on the way between.
    All entries move at about the same speed, so that one that has hardly moved has come back.
    """

    def __init__(self, start: _Point, end: _Point):
        way, change = np.abs(end.at - start.at), np.abs(end.slope - start.slope)
        steepest = max(float(np.linalg.norm(start.slope)), float(np.linalg.norm(end.slope)))
        if np.linalg.norm(change) < _CHANGED * steepest:  # rounding: x has not gone anywhere
            change = np.zeros_like(change)
        curvature = change / np.maximum(way, _HARDLY * max(way.max(initial=0.0), _TINY))
        middle = np.median(curvature[curvature > 0]) if (curvature > 0).any() else 1.0
        self.scales = 1 / np.sqrt(np.maximum(curvature, _LEAST * middle))
        self.steepest = max(self.norm(start.slope), self.norm(end.slope))
        # As far as a parabola would have to go whose slope has fallen by so much on the way of the run.
        self._way = float(np.linalg.norm(way / self.scales)) or float(np.linalg.norm(start.at / self.scales))

    def norm(self, slope: np.ndarray) -> float:
        """The size of a slope."""
        return float(np.linalg.norm(slope * self.scales))

    def length(self, point: _Point) -> float:
        """How far to go at first from a point."""
        return (self._way or 1.0) * self.norm(point.slope) / self.steepest if self.steepest > 0 else 0.0


class _EnoughError(Exception):
    """The search is over."""


class _Search:
    """L-BFGS from a point.

    Attributes:
      best: the point with the least F so far.
      count: how often F was computed.
    """

    def __init__(self, exact: _Exact, first: _Point, units: _Units):
        self._exact, self._first, self._units = exact, first, units
        self.best, self.count = first, 0
        self._bests: list[float] = []
        self._unit = units.length(first)
        self._unit_of_value = units.norm(first.slope) * self._unit
        self._same = 0

    def run(self) -> None:
        """Searches until nothing more is found, or `_EnoughError` is raised."""
        from scipy.optimize import minimize  # a dependency of JAX

        if not 0 < self._unit_of_value < np.inf:
            return
        self._find_unit()
        seen = [self.best.value]

        def after_iteration(_: Any) -> None:
            seen.append(self.best.value)
            gained = np.inf if len(seen) <= _ITERATIONS else seen[-1 - _ITERATIONS] - seen[-1]
            flat = self._units.norm(self.best.slope) <= _FLAT * self._units.steepest
            if gained <= (_ENOUGH if flat else _STUCK) * (self._first.value - self.best.value):
                raise _EnoughError

        # Its own criteria are in units of F and x.
        options = {"maxiter": _MOST, "maxfun": _MOST, "ftol": 0.0, "gtol": 0.0}
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
        """The share of a decrease of F that came last, if it is large."""
        part = int(_LATE * self.count)
        share = (self._bests[part - 1] - self.best.value) / fallen if part and fallen > 0 else 0.0
        return share if share > _FALLING else 0.0

    def _look(self, at: np.ndarray) -> tuple[float, np.ndarray]:
        """F and ∇F at a place, in the units of the search and beside where it began."""
        if self._exact.is_over:
            raise _EnoughError
        scales = self._unit * self._units.scales
        found = self._exact(self._first.at + scales * at, self.best.truth.y)
        self.count += 1
        self._bests.append(self.best.value)
        if found is None:
            return _UNSOLVED, np.zeros_like(at)
        change = abs(found.value - self.best.value)
        self._same = self._same + 1 if change <= self._exact.rounding(found) else 0
        if found.value < self.best.value:
            self.best = found
        if self._same >= _TIMES:
            raise _EnoughError
        value = (found.value - self._first.value) / self._unit_of_value
        return value, found.slope * scales / self._unit_of_value
