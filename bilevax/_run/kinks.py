"""Along the kinks of a risk: L-BFGS on smooth risks that come nearer and nearer to it.

Where the worst groups or blocks change places, gradients on either side say nothing about the way along the
kink, and L-BFGS stalls. Each search begins where the one before it has ended. What counts is F itself.
"""

from __future__ import annotations

from bilevax._run.descent import Exact, Point, Search, Units

_WIDTH, _NARROWER, _RISKS = 0.1, 0.3, 9  # of the decrease of F so far; than the risk before; how many


def along_kinks(exact: Exact, best: Point, units: Units, fallen: float) -> tuple[list[Search], bool]:
    """Searches from the best point so far, the last one on F itself; none if the risk has no kinks.

    And whether there was no time for all of them.
    """
    risk, width, at, searches = exact.problem.risk, _WIDTH * fallen, best, []
    for _ in range(_RISKS):
        smooth = None if risk is None or width <= exact.rounding(best) else risk.smoothed(width)
        if smooth is None or exact.is_over:
            break
        exact.smooth = smooth
        first = exact(at.at, at.y)
        if first is None:
            break
        searches.append(Search(exact, first, units, fallen))
        searches[-1].run()
        at, width = searches[-1].lowest, _NARROWER * width
    exact.smooth = None
    if searches:
        at = min((search.best for search in searches), key=lambda one: one.value)
        first = None if exact.is_over else exact(at.at, at.y)
        if first is not None:
            searches.append(Search(exact, first, units, fallen))
            searches[-1].run()
    has_kinks = risk is not None and fallen > 0 and risk.smoothed(_WIDTH * fallen) is not None
    return searches, has_kinks and exact.is_over
