"""Exact steps at the end of a run whose blocks can all be solved: L-BFGS from where the run has ended.

A run follows x with lower variables that lag behind, and with steps that shrink. It comes near a minimum of
F, and what is left is slow. Where all blocks together are so small that to solve them is a small part of the
work of a run, F and ∇F can be had exactly, and some quasi-Newton steps do what thousands of steps would. F
falls from each to the next, so that the answer is never worse than without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._run.descent import Exact, Point, Search, Units
from bilevax._step.state import State
from bilevax._truth.few_blocks import affordable_blocks, work_of_a_newton_step
from bilevax._truth.lower_solve import SMALL
from bilevax._util.trees import PyTree

_SHARE = 0.5  # of the work of a run, at most
_CHEAP = 2**30  # numbers read, up to which the work of the run does not matter
_MATRICES = 2**26  # numbers in the Hessians of all blocks, which are in memory at once, several times over
_ENTRIES = 2**22  # of x, of which L-BFGS keeps some twenty copies
_FEWEST = 25  # Newton steps of all blocks, which are worth a try
_STEEP = 0.1  # ‖∇F‖, as a share of the largest one, above which x is no stationary point
_AGREE = 0.1  # of the decrease, by which F may differ if the blocks are solved from elsewhere
_BEYOND, _ENDLESS = 10.0, 0.03  # times as far from x0: if F is lower there by such a share of its decrease


@dataclasses.dataclass(frozen=True)
class Finish:
    """What exact steps at the end of a run have done.

    Attributes:
      evaluations: how often all blocks were solved on all their rows, for F and ∇F.
      before: F where the run had ended; where it had begun, if F has no value at the end.
      after: F at the x that is returned; `before` if nothing less was found.
      slope: ‖∇F‖ at the x that is returned, as a share of the larger one of those where the run began and
        ended; entries of x are measured in units of their own. 1 if both are zero.
      falling: the share of the decrease of F that came last, if F still fell fast when the search was cut;
        else 0.
      is_endless: whether F goes on falling far beyond the x that is returned.
      was_cut: whether the search for less was ended while it still found less.
    """

    evaluations: int
    before: float
    after: float
    slope: float
    falling: float
    is_endless: bool = False
    was_cut: bool = False

    def __str__(self) -> str:
        return f"{self.evaluations} exact evaluations took F from {self.before:.4g} to {self.after:.4g}"

    @property
    def is_steep(self) -> bool:
        """Whether F is still steep where nothing less was found."""
        return self.slope > _STEEP

    def doubt(self, steps: int) -> str:
        """What to say if x is still on its way after a run of some steps, or always will be; else nothing."""
        if self.is_endless:
            return (
                f"F falls on {_BEYOND:.0f} times as far from x0 as exact steps have gone: it seems to have "
                "no minimum. Bound x (bx.bounded), or add a regulariser to f, such as 1e-3 ‖x‖²"
            )
        if not self.falling and not (self.was_cut and self.is_steep):
            return ""
        what = (
            f"{self.falling:.0%} of the decrease of F came in the last of"
            if self.falling
            else f"‖∇F‖ is still {self.slope:.2g} times its largest value after"
        )
        return (
            f"x is still on its way: {what} {self.evaluations} exact evaluations: "
            f"try steps={4 * steps} instead of {steps}"
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


def newton_steps_left(problem: Problem, state: State, work: float) -> int:
    """How many Newton steps of all blocks are a small part of the work of a run; 0 if they are too few."""
    entries = sum(leaf[0].size for leaf in jax.tree.leaves(state.y))
    too_wide = problem.count * min(entries, SMALL) ** 2 > _MATRICES
    too_wide |= sum(leaf.size for leaf in jax.tree.leaves(state.x)) > _ENTRIES
    if too_wide or affordable_blocks(problem, problem.count) < problem.count:
        return 0
    count = int(max(_SHARE * work, _CHEAP) // work_of_a_newton_step(problem, state.y))
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
      newton_steps: of all blocks, about at most.
      is_over: whether to stop now, with what was found so far.

    Returns:
      What was found; None if there is no time, or if blocks cannot be solved, neither where the run began nor
      where it ended, or not uniquely.
    """
    exact = Exact(problem.without_centres(), state.settled, newton_steps, is_over)
    if exact.is_over:
        return None
    places = (exact(exact.flat(x), exact.tracked) for x in (state.settled.x, x0))
    known = [place for place in places if place is not None]
    if not known:
        return None
    units = Units(known[-1], known[0])
    searches = [Search(exact, place, units) for place in known]
    for search in searches:
        search.run()
    for search in sorted(searches, key=lambda one: one.best.value):
        best, gained = search.best, known[0].value - search.best.value
        # y(x) is not unique, or no solution, if blocks that are solved from elsewhere give another F.
        others = [exact(best.at, y) for y in (exact.tracked, *(place.truth.y for place in known))]
        off = [abs(other.value - best.value) for other in others if other is not None]
        if not (gained >= 0 and off and max(off) <= max(_AGREE * gained, exact.rounding(best))):
            continue
        fallen = max(place.value for place in known) - best.value
        falling, endless = search.falling(fallen), _falls_on(exact, best, exact.flat(x0), fallen)
        slope = units.norm(best.slope) / units.steepest if units.steepest > 0 else 1.0
        report = Finish(exact.count, known[0].value, best.value, slope, falling, endless, search.was_cut)
        return Finished(exact.unflat(best.at), problem.view(best.truth.y), report)
    return None


def _falls_on(exact: Exact, best: Point, start: np.ndarray, fallen: float) -> bool:
    """Whether F is clearly lower far beyond a point, as seen from where the run began."""
    beyond = exact(start + _BEYOND * (best.at - start), best.truth.y) if fallen > 0 else None
    return beyond is not None and best.value - beyond.value > _ENDLESS * fallen
