"""Exact steps at the end of a run whose blocks can be solved: L-BFGS from where the run has ended.

A run follows x with lower variables that lag behind, and with steps that shrink. It comes near a minimum of
F, and what is left is slow. Where all blocks together are so small that to solve them is a small part of the
work of a run, F and ∇F can be had exactly, and some quasi-Newton steps do what thousands of steps would. F
falls from each to the next, so that the answer is never worse than without.

Where all blocks are too many, a sample of them is solved. The minimum of their mean is near that of F, and
it is taken if it is clearly better on other blocks as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from bilevax._problem.problem import Problem
from bilevax._run.descent import Exact, Point, Search, Units, at_once
from bilevax._run.held_out import divided, judged
from bilevax._step.state import State
from bilevax._truth.few_blocks import work_of_a_newton_step
from bilevax._truth.lower_solve import USUAL_STEPS
from bilevax._util.trees import PyTree

_SHARE = 0.5  # of the work of a run, at most
_CHEAP = 2**31  # numbers read, up to which the work of the run does not matter
_ENTRIES = 2**22  # of x, of which L-BFGS keeps some twenty copies
_SEARCH = 600  # Newton steps of a search that comes to its end, about
_NEARLY, _FEWEST = 150, 25  # those that come near it, and those that are worth a try
_SMALLEST = 64  # blocks of a sample
_STEEP = 0.1  # ‖∇F‖, as a share of the largest one, above which x is no stationary point
_FLAT = 0.003  # the same, below which little is left of F where a search on a sample is cut
_AGREE = 0.1  # of the decrease, by which F may differ if the blocks are solved from elsewhere
_BEYOND, _ENDLESS = 10.0, 0.03  # times as far from x0: if F is lower there by such a share of its decrease


@dataclasses.dataclass(frozen=True)
class Finish:
    """What exact steps at the end of a run have done.

    Attributes:
      evaluations: how often all blocks, or all of a sample, were solved on all their rows, for F and ∇F.
      before: F where the run had ended; where it had begun, if F has no value at the end. After a search on a
        sample of the blocks it is the mean over other blocks; likewise `after`.
      after: F at the x that is returned; `before` if nothing less was found.
      slope: ‖∇F‖ at the x that is returned, as a share of the larger one of those where the run began and
        ended; entries of x are measured in units of their own. 1 if both are zero.
      falling: the share of the decrease of F that came last, if F still fell fast when the search was cut;
        else 0.
      is_endless: whether F goes on falling far beyond the x that is returned.
      was_cut: whether the search for less was ended while it still found less.
      judges: how many blocks beside the sample were solved to compare both x; 0 if all blocks were searched.
    """

    evaluations: int
    before: float
    after: float
    slope: float
    falling: float
    is_endless: bool = False
    was_cut: bool = False
    judges: int = 0

    def __str__(self) -> str:
        sample, judges = (" of a sample", f" on {self.judges} other blocks") if self.judges else ("", "")
        change = f"F from {self.before:.4g} to {self.after:.4g}"
        return f"{self.evaluations} exact evaluations{sample} took {change}{judges}"

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
        if self.was_cut and self.judges and self.slope > _FLAT and not self.falling:
            return (
                "x may still be on its way: the search on a sample of the blocks was cut while it still "
                f"found less: try steps={4 * steps} instead of {steps}, or standardise the data: units that "
                "differ by orders of magnitude make it long"
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


class Effort(NamedTuple):
    """What exact steps may cost.

    Attributes:
      blocks: how many blocks are solved at every x.
      newton_steps: how many Newton steps of each may be taken, about.
    """

    blocks: int
    newton_steps: int


def affordable_effort(problem: Problem, state: State, work: float) -> Effort | None:
    """All blocks, or as many as are a small part of the work of a run; None if they would be too few."""
    count, most = problem.count, at_once(problem, state.y)
    if sum(leaf.size for leaf in jax.tree.leaves(state.x)) > _ENTRIES:
        return None
    # A risk is not the mean of what it is on parts of the blocks.
    if most == 0 or (most < count and problem.risk is not None):
        return None
    newton_steps = int(max(_SHARE * work, _CHEAP) // work_of_a_newton_step(problem, state.y))
    # What a sample finds has to be judged on as many other blocks, and all blocks are solved once at the end.
    left = (newton_steps - USUAL_STEPS) * count
    size = min(count // 3, left // (_SEARCH + 2 * USUAL_STEPS))
    if newton_steps < _NEARLY and size >= _SMALLEST and problem.risk is None:
        return Effort(size, left // size - 2 * USUAL_STEPS)
    return Effort(count, newton_steps) if newton_steps >= _FEWEST else None


def finish(
    problem: Problem,
    state: State,
    x0: PyTree,
    effort: Effort,
    is_over: Callable[[], bool] = lambda: False,
) -> Finished | None:
    """Minimises F with blocks solved: from the x of a state, and from x0, where F may have other minima.

    Args:
      problem: the problem.
      state: the state of a run at its end.
      x0: where it started.
      effort: how many blocks to solve; if not all, what is found must be better on others, too.
      is_over: whether to stop now, with what was found so far.

    Returns:
      What was found; None if there is no time, or if blocks cannot be solved, neither where the run began nor
      where it ended, or not uniquely.
    """
    problem, state = problem.without_centres(), state.settled
    sample = divided(problem.count, effort.blocks)
    exact = Exact(problem, state, sample.searched, effort.newton_steps, is_over)
    if exact.is_over:
        return None
    places = (exact(exact.flat(x), exact.tracked) for x in (state.x, x0))
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
        others = [exact(best.at, y) for y in (exact.tracked, *(place.y for place in known))]
        off = [abs(other.value - best.value) for other in others if other is not None]
        if not (gained >= 0 and off and max(off) <= max(_AGREE * gained, exact.rounding(best))):
            continue
        fallen = max(place.value for place in known) - best.value
        falling, endless = search.falling(fallen), _falls_on(exact, best, exact.flat(x0), fallen)
        slope = units.norm(best.slope) / units.steepest if units.steepest > 0 else 1.0
        report = Finish(exact.count, known[0].value, best.value, slope, falling, endless, search.was_cut)
        found = Finished(exact.unflat(best.at), best.y, report)
        if len(sample.judges):
            found = _for_all_blocks(found, known[0], best, exact, state, sample.judges, is_over)
        return found and found._replace(y=problem.view(found.y))
    return None


def _for_all_blocks(
    found: Finished,
    ended: Point,
    best: Point,
    exact: Exact,
    state: State,
    judges: np.ndarray,
    is_over: Callable[[], bool],
) -> Finished | None:
    """What was found on a sample, with the y(x) of all blocks; None if it is not better on other blocks."""
    values = judged(Exact(exact.problem, state, judges, USUAL_STEPS), ended.at, best.at)
    if values is None or is_over():
        return None
    everywhere = Exact(exact.problem, state, np.arange(exact.problem.count), USUAL_STEPS)
    whole = everywhere(best.at, everywhere.tracked)
    report = dataclasses.replace(found.report, before=values.before, after=values.after, judges=len(judges))
    return None if whole is None else Finished(found.x, whole.y, report)


def _falls_on(exact: Exact, best: Point, start: np.ndarray, fallen: float) -> bool:
    """Whether F is clearly lower far beyond a point, as seen from where the run began."""
    beyond = exact(start + _BEYOND * (best.at - start), best.y) if fallen > 0 else None
    return beyond is not None and best.value - beyond.value > _ENDLESS * fallen
