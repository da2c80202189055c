"""F estimated from a history, and whether it still improves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

_FEWEST = 8  # entries in a window
_CLEAR = 3.0  # standard errors between two windows that differ
_LIKELY, _STEEP = 1.5, 0.1  # standard errors, and the share of all that f has fallen by, in a quarter
_DIGITS = 1e-4  # of F, below which a change does not show in what is printed
_MOST_ALIKE = 0.9  # correlation of neighbours
_WINDOWS, _RISEN = 10, 0.05  # in a history; of the decrease of f, which it has lost again
_TO_COME, _STEADY = 0.02, 0.9  # of the decrease of f; of a quarter's decrease, at most, that the next brings

_LEVEL = "no longer improving"
_ADVICE = (
    f"F is {_LEVEL}: it is at a minimum, or at the level of its noise, which more rows per step (batch_size, "
    "blocks_per_step, unless all are seen) or a smaller step may lower"
)


class Estimate(float):
    """F as the latest entries of a history show it: a number that prints with its error and its trend.

    Attributes:
      error: its standard error; NaN if there are too few entries.
      trend: "improving", "rising", "no longer improving" (no change beyond how far entries differ), "steady"
        (no change in four digits), or "" if there are too few entries to tell.
    """

    error: float
    trend: str

    def __new__(cls, value: float, error: float, trend: str) -> Self:
        new = super().__new__(cls, value)
        new.error, new.trend = error, trend
        return new

    @property
    def advice(self) -> str:
        """What to do if F does not get better; empty if it does, or if there is nothing to say."""
        return _ADVICE if self.trend == _LEVEL else ""

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        error = "" if np.isnan(self.error) else f" ± {self.error:.1g}"
        return format(float(self), spec or ".4g") + error + (f", {self.trend}" if self.trend else "")


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of the latest quarter of some entries, compared with that of the quarter before.

    Args:
      values: the tracked f of each entry of a history.

    Example:
      >>> from bilevax._run.trend import estimate
      >>> print(estimate([2.0**-n for n in range(40)]))
      1.861e-10 ± 9e-11, improving
    """
    known = np.asarray(values, float)
    window = max(_FEWEST, len(known) // 4)
    latest, before = known[-window:], known[-2 * window : -window]
    value, error = _mean(latest)
    if len(before) < window or not np.isfinite([*latest, *before]).all():
        return Estimate(value, error, "")
    value_before, error_before = _mean(before)
    fall, noise = value_before - value, _CLEAR * float(np.hypot(error, error_before))
    if max(abs(fall), noise) <= _DIGITS * abs(value):
        return Estimate(value, error, "steady")
    # Windows that do not overlap differ, whatever their errors: a fast fall is no straight line.
    apart = latest.max() < before.min() or latest.min() > before.max()
    if abs(fall) <= noise and not apart and not _is_steep(known[:window], fall, noise, value, error):
        return Estimate(value, error, _LEVEL)
    return Estimate(value, error, "improving" if fall > 0 else "rising")


def rise(values: Sequence[float]) -> tuple[int, float, float] | None:
    """Where f was certainly lower than it is at the end, if it was: the entry, f there, and f now.

    Args:
      values: the tracked f of each entry of a history.

    Example:
      >>> from bilevax._run.trend import rise
      >>> rise([5, 4, 3, 2] + [1] * 20 + [3] * 12)
      (11, 1.0, 3.0)
    """
    known = np.asarray(values, float)
    window = max(_FEWEST, len(known) // _WINDOWS)
    if len(known) < 2 * window or not np.isfinite(known).all():
        return None
    means = [_mean(known[end - window : end]) for end in range(window, len(known) + 1)]
    place = int(np.argmin([value for value, _ in means]))
    (least, error), (latest, error_latest) = means[place], means[-1]
    noise = _CLEAR * float(np.hypot(error, error_latest))
    if latest - least <= max(noise, _RISEN * (means[0][0] - least), _DIGITS * abs(latest)):
        return None
    return place + window - 1, least, latest


def still_falls(values: Sequence[float]) -> float:
    """The share of the decrease of f that came in the last quarter, if as much again may follow; else 0.

    What is to come is guessed from the last two quarters, as if each were the same part of the one before.

    Args:
      values: the tracked f of each entry of a history.

    Example:
      >>> from bilevax._run.trend import still_falls
      >>> falling, settled = still_falls(range(100, 0, -1)), still_falls([2.0**-n for n in range(100)])
      >>> round(falling, 2), settled
      (0.28, 0.0)
    """
    known = np.asarray(values, float)
    window = max(_FEWEST, len(known) // _WINDOWS)
    if len(known) < 4 * window or not np.isfinite(known).all():
        return 0.0
    ends = [round(part * len(known)) for part in (0.5, 0.75, 1)]
    (half, _), (before, error_before), (latest, error) = (_mean(known[end - window : end]) for end in ends)
    fall, whole = before - latest, max(float(np.mean(known[:window])), half) - latest
    if whole <= 0 or fall <= max(_CLEAR * float(np.hypot(error, error_before)), _DIGITS * abs(latest)):
        return 0.0
    ratio = min(_STEADY, fall / (half - before)) if half > before else _STEADY
    return fall / whole if fall * ratio / (1 - ratio) > _TO_COME * whole else 0.0


def _is_steep(first: np.ndarray, fall: float, noise: float, value: float, error: float) -> bool:
    """Whether f, which has certainly fallen since the first entries, has probably gone on to.

    Where x overshoots now and then, f swings by more than noise, and the errors are as large as the fall.
    """
    value_first, error_first = _mean(first)
    fallen = value_first - value
    certain = fallen > _CLEAR * float(np.hypot(error, error_first))
    return certain and fall > max(_STEEP * fallen, _LIKELY / _CLEAR * noise)


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error, for entries that may drift and depend on their neighbours."""
    count = len(values)
    if count < _FEWEST or not np.isfinite(values).all():
        return float(np.mean(values)) if count else np.nan, np.nan
    times = np.arange(count) - (count - 1) / 2
    centred = values - np.mean(values)
    # A drift is no noise: without it, a history that falls steadily would have a large error.
    rest = centred - times * (times @ centred) / (times @ times)
    squares = float(rest @ rest)
    alike = np.clip(rest[1:] @ rest[:-1] / squares, 0, _MOST_ALIKE) if squares > 0 else 0.0
    variance = squares / (count - 2) * (1 + alike) / (1 - alike)
    return float(np.mean(values)), float(np.sqrt(variance / count))
