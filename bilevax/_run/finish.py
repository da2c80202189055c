"""Exact steps at the end of a run whose blocks can be solved: L-BFGS from where the run has ended.

A run follows x with lower variables that lag behind, and with steps that shrink. It comes near a minimum of
F, and what is left is slow. Where to solve all blocks together many times takes no longer than a run, F and
∇F can be had exactly, and some quasi-Newton steps do what thousands of steps would. F falls from each to the
next, so that the answer is never worse than without. What else may hide less is looked at then: kinks of a
risk (`kinks`), and entries of x on which F hardly depends (`elsewhere`).

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
from bilevax._run.elsewhere import Elsewhere
from bilevax._run.finish_report import BEYOND, Finish
from bilevax._run.held_out import divided, judged
from bilevax._run.kinks import along_kinks
from bilevax._step.state import State
from bilevax._truth.few_blocks import work_of_a_newton_step
from bilevax._truth.lower_solve import USUAL_STEPS
from bilevax._util.trees import PyTree

_SHARE = 1.0  # of the work of a run, at most
_CHEAP = 2**32  # numbers read, up to which the work of the run does not matter
_ENTRIES = 2**22  # of x, of which L-BFGS keeps some twenty copies
_SEARCH = 600  # Newton steps of a search that comes to its end, about
_NEARLY, _FEWEST = 150, 25  # those that come near it, and those that are worth a try
_SMALLEST = 64  # blocks of a sample
_NEAR = 1e-3  # of its decrease, by which F may be more at a point that says how steep it is
_AGREE = 0.1  # of the decrease, by which F may differ if the blocks are solved from elsewhere
_ENDLESS = 0.03  # of its decrease, by which F must be lower far beyond x
_NO_TIME = "there was no time"


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


class Kept(NamedTuple):
    """That the x of a run is its answer.

    Attributes:
      why: why exact steps have not changed it.
      y: y(x); None if it is not known.
      failed: whether an error has ended them.
    """

    why: str
    y: PyTree | None = None
    failed: bool = False


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
) -> Finished | Kept:
    """Minimises F with blocks solved: from the x of a state, and from x0, where F may have other minima.

    Args:
      problem: the problem.
      state: the state of a run at its end.
      x0: where it started.
      effort: how many blocks to solve; if not all, what is found must be better on others, too.
      is_over: whether to stop now, with what was found so far.

    Returns:
      What was found; that x is kept if there is no time, or if blocks cannot be solved, neither where the run
      began nor where it ended, or not uniquely.
    """
    problem, state = problem.without_centres(), state.settled
    sample = divided(problem.count, effort.blocks)
    exact = Exact(problem, state, sample.searched, effort.newton_steps, is_over)
    if exact.is_over:
        return Kept(_NO_TIME)
    start = exact.flat(x0)
    places = [exact(at, exact.tracked) for at in (exact.flat(state.x), start)]
    known = [place for place in places if place is not None]
    if not known:
        return Kept("lower problems could not be solved, neither where the run began nor where it ended")
    units = Units(known[-1], known[0])
    searches, is_flat, was_cut = _searched(exact, known, units, start, state.x)
    highest = max(place.value for place in known)
    for search in sorted(searches, key=lambda one: one.best.value):
        best, gained = search.best, known[0].value - search.best.value
        # y(x) is not unique, or no solution, if blocks that are solved from elsewhere give another F.
        others = [exact(best.at, y) for y in (exact.tracked, *(place.y for place in known))]
        off = [abs(other.value - best.value) for other in others if other is not None]
        if not (gained >= 0 and off and max(off) <= max(_AGREE * gained, exact.rounding(best))):
            continue
        fallen = highest - best.value
        # At a kink of a risk, the gradient on either side of it says nothing.
        seen = [point for one in searches for point in (one.best, one.lowest)]
        near = [point for point in seen if point.value <= best.value + _NEAR * fallen]
        report = Finish(
            exact.count,
            known[0].value,
            best.value,
            slope=min(units.share(point.slope) for point in near),
            falling=search.falling(fallen),
            is_endless=_falls_on(exact, best, start, fallen),
            was_cut=search.was_cut or was_cut,
            is_flat=is_flat,
        )
        if len(sample.judges):
            return _for_all_blocks(report, known[0], best, exact, state, sample.judges, is_over)
        return Finished(exact.unflat(best.at), problem.view(best.y), report)
    return Kept("where F seemed to be less, y(x) is not unique: it depends on where a block is solved from")


def _searched(
    exact: Exact, known: list[Point], units: Units, start: np.ndarray, x: PyTree
) -> tuple[list[Search], bool, bool]:
    """All searches; whether F is flat where they led, and kinks go on, with no time to look."""
    searches = [Search(exact, place, units) for place in known]
    for search in searches:
        search.run()

    def least() -> tuple[Point, float]:
        best = min((search.best for search in searches), key=lambda one: one.value)
        return best, max(place.value for place in known) - best.value

    along, was_cut = along_kinks(exact, least()[0], units, least()[1])
    searches += along
    elsewhere = Elsewhere(exact, start, [leaf.size for leaf in jax.tree.leaves(x)], least()[1])
    elsewhere.run(least()[0], units)
    if elsewhere.searches:
        searches += elsewhere.searches
        along, was_cut = along_kinks(exact, least()[0], units, least()[1])
        searches += along
    return searches, elsewhere.is_flat, was_cut


def _for_all_blocks(
    report: Finish,
    ended: Point,
    best: Point,
    exact: Exact,
    state: State,
    judges: np.ndarray,
    is_over: Callable[[], bool],
) -> Finished | Kept:
    """What was found on a sample, if it is better on other blocks; with the y(x) of all blocks."""
    problem = exact.problem
    values = judged(Exact(problem, state, judges, USUAL_STEPS), ended.at, best.at)
    if is_over():
        return Kept(_NO_TIME)
    everywhere = Exact(problem, state, np.arange(problem.count), USUAL_STEPS)
    whole = everywhere((best if values else ended).at, everywhere.tracked)
    y = whole and problem.view(whole.y)
    if values is None:
        return Kept("what they found on a sample of the blocks is not clearly better on others", y)
    if whole is None:
        return Kept("at the x that they found on a sample of the blocks, others could not be solved")
    report = dataclasses.replace(report, before=values.before, after=values.after, judges=len(judges))
    return Finished(exact.unflat(best.at), y, report)


def _falls_on(exact: Exact, best: Point, start: np.ndarray, fallen: float) -> bool:
    """Whether F is clearly lower far beyond a point, as seen from where the run began."""
    beyond = exact(start + BEYOND * (best.at - start), best.y) if fallen > 0 else None
    return beyond is not None and best.value - beyond.value > _ENDLESS * fallen
