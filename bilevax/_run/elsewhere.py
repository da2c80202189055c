"""A look elsewhere, from where a search has ended: at other values of entries of x on which F hardly depends.

A log-penalty of +9 shrinks y to nothing, and so does one of +12: F is flat between them, and its gradient
says nothing about what it would be at 0. So entries along which F is flat are moved, one at a time and those
of a leaf together, by lengths that suit logarithms and other entries of order one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bilevax._run.descent import Exact, Point, Search, Units

_NEAR = 1.0  # how far to look at first
_FAR = (2.0, 4.0, 8.0, 16.0)  # and then, if F is flat
_STEEP = 0.02  # of the decrease of F: if it rises by more on both sides, an entry is where it should be
_CLEAR = 1e-3  # the same: the least that is worth going elsewhere for
_TIMES = 3  # how often to go elsewhere
_MOST = 64  # entries that are moved one at a time
_EVALUATIONS = 300  # at most
_SHARE = 0.5  # of the Newton steps that are left, likewise


class Elsewhere:
    """Looks elsewhere, and searches from there.

    Args:
      exact: F.
      start: x0.
      leaves: how many entries the leaves of x have.
      fallen: by how much F has fallen.

    Attributes:
      searches: what has begun elsewhere.
      is_flat: whether F is flat along some entries, and there was no time to try other values of them.
    """

    def __init__(self, exact: Exact, start: np.ndarray, leaves: Sequence[int], fallen: float):
        self._exact, self._start, self._fallen = exact, start, fallen
        self._groups = _groups(leaves)
        self._until = exact.left - int(_SHARE * exact.left), exact.count + _EVALUATIONS
        self.searches: list[Search] = []
        self.is_flat = False

    def run(self, best: Point, units: Units) -> None:
        """Looks around the best point so far, and goes on from what is better, while there is time."""
        for _ in range(_TIMES):
            better = best
            for group in self._groups:
                better = self._better(better, group)
            if better is best:
                break
            self.searches.append(Search(self._exact, better, units, self._fallen))
            self.searches[-1].run()
            best = self.searches[-1].best

    def _better(self, best: Point, group: np.ndarray) -> Point:
        """The point itself, or one that is clearly better, with other values of a group of entries."""
        near = [self._moved(best, group, best.at[group] + sign * _NEAR) for sign in (1, -1)]
        change = [abs(one.value - best.value) for one in near if one is not None]
        rise = min((one.value for one in near if one is not None), default=np.inf) - best.value
        if rise > _STEEP * self._fallen:
            return best
        if self._is_over and change and max(change) < _CLEAR * self._fallen:
            self.is_flat = True
        here, there = best.at[group], self._start[group]
        values = [here + sign * far for far in _FAR for sign in (1, -1)]
        if np.abs(there - here).max() > _NEAR:
            values += [there, *(there + sign * far for far in (_NEAR, *_FAR) for sign in (1, -1))]
        found = [one for one in (*near, *(self._moved(best, group, value) for value in values)) if one]
        least = min(found, key=lambda one: one.value, default=best)
        clear = max(_CLEAR * self._fallen, self._exact.rounding(best))
        return least if least.value < best.value - clear else best

    def _moved(self, best: Point, group: np.ndarray, values: np.ndarray) -> Point | None:
        if self._is_over or self._exact.count >= self._until[1]:
            return None
        at = best.at.copy()
        at[group] = values
        return self._exact(at, best.y)

    @property
    def _is_over(self) -> bool:
        return self._exact.is_over or self._exact.left <= self._until[0]


def _groups(leaves: Sequence[int]) -> list[np.ndarray]:
    """The entries of every leaf, and every entry, if they are few."""
    ends = np.cumsum(leaves)
    wholes = [np.arange(end - size, end) for end, size in zip(ends, leaves, strict=True) if size]
    single = [np.arange(one, one + 1) for one in range(sum(leaves))] if sum(leaves) <= _MOST else []
    return [one for one in wholes if len(one) > 1 or not single] + single
