"""L-BFGS with bounds, which keeps its memory from one objective to the next.

The prior is learnt from a part of the groups first. The curvature that was found there is that of all groups
too, so that few steps are left for them; SciPy's L-BFGS-B would begin again without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

_PAIRS = 30  # of moves and changes of the gradient
_ENOUGH, _FLAT = 1e-4, 0.9  # Wolfe's conditions: a share of the decrease, and of the slope
_TRIALS = 20  # lengths of a step
_ROUNDING = 1e-15  # of the value: what is lost in it
_FIRST = 0.1  # the largest entry of the first move, when no curvature is known
_SMALL = 0.1  # of the tolerance: the decrease that is expected of a step that is not worth taking

Evaluate = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclasses.dataclass
class Point:
    """A place with its value and gradient."""

    at: np.ndarray
    value: float
    slope: np.ndarray


class Descent:
    """Steps of L-BFGS within bounds.

    Args:
      low: the least value of every variable.
      high: the greatest.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray):
        self.low, self.high = low, high
        self.moves: list[np.ndarray] = []
        self.changes: list[np.ndarray] = []

    def run(
        self,
        evaluate: Evaluate,
        here: Point,
        *,
        most: int,
        tol: float,
        after_step: Callable[[Point], None],
    ) -> Point:
        """Goes down until a step lowers the value by less than `tol`.

        Args:
          evaluate: value and gradient; a value that is not finite makes a step shorter.
          here: where to begin.
          most: the most steps.
          tol: the decrease at which to end.
          after_step: is called after every step.

        Returns:
          The last place.
        """
        for _ in range(most):
            direction = self.direction(here)
            expected = -float(here.slope @ direction)
            if expected <= 0 or (self.moves and expected <= 2 * _SMALL * tol):
                break
            there = self._along(evaluate, here, direction)
            if there is None:
                if not self.moves:
                    break
                self.moves, self.changes = [], []  # what was known of the curvature misled
                continue
            self._remember(there.at - here.at, there.slope - here.slope)
            gained, here = here.value - there.value, there
            after_step(here)
            if gained <= tol:
                break
        return here

    def direction(self, here: Point) -> np.ndarray:
        """Where to go: against the gradient, bent by the curvature that is remembered."""
        held = ((here.at <= self.low) & (here.slope > 0)) | ((here.at >= self.high) & (here.slope < 0))
        left = np.where(held, 0.0, here.slope)
        if not self.moves:
            return -left * _FIRST / max(float(np.abs(left).max()), 1e-300)
        shares = []
        for move, change in zip(reversed(self.moves), reversed(self.changes), strict=True):
            share = float(move @ left) / float(move @ change)
            left = left - share * change
            shares.append(share)
        left = left * (self.moves[-1] @ self.changes[-1]) / (self.changes[-1] @ self.changes[-1])
        for move, change, share in zip(self.moves, self.changes, reversed(shares), strict=True):
            left = left + (share - float(change @ left) / float(move @ change)) * move
        return np.where(held, 0.0, -left)

    def _along(self, evaluate: Evaluate, here: Point, direction: np.ndarray) -> Point | None:
        """A place along the direction that is low enough and flat enough; None if there is none lower."""
        shortest, longest, length, best = 0.0, np.inf, 1.0, None
        fall = float(here.slope @ direction)
        for _ in range(_TRIALS):
            if -length * fall <= _ROUNDING * abs(here.value):
                break
            at = np.clip(here.at + length * direction, self.low, self.high)
            there = Point(at, *evaluate(at))
            finite = np.isfinite(there.value) and np.isfinite(there.slope).all()
            if finite and there.value < (here if best is None else best).value:
                best = there
            if not finite or there.value > here.value + _ENOUGH * length * fall:
                longest = length
                bend = there.value - here.value - length * fall if finite else np.inf
                guess = -0.5 * fall * length**2 / bend if bend > 0 else 0.0
                length = float(
                    np.clip(guess, shortest + 0.1 * (longest - shortest), 0.5 * (shortest + longest))
                )
            elif float(there.slope @ direction) < _FLAT * fall:
                shortest = length
                length = 2.5 * length if np.isinf(longest) else 0.5 * (shortest + longest)
            else:
                return there
        return best

    def _remember(self, move: np.ndarray, change: np.ndarray) -> None:
        if float(move @ change) > 1e-10 * float(np.linalg.norm(move) * np.linalg.norm(change)):
            self.moves, self.changes = [*self.moves, move][-_PAIRS:], [*self.changes, change][-_PAIRS:]
