"""Exponents of power laws: a straight line through logarithms for each seed, and the spread over seeds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Exponent:
    """The slope of log T over the logarithm of another quantity.

    Attributes:
      slope: the mean over seeds.
      error: its standard error.
      half_width: half the width of its 95% confidence interval, by Student's t.
      intercept: log T where the other logarithm is zero.
      points: number of abscissae in the fit.
    """

    slope: float
    error: float
    half_width: float
    intercept: float
    points: int

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.half_width:.2f}" if self.points > 1 else ""

    def at(self, abscissa: np.ndarray) -> np.ndarray:
        """The fitted power law."""
        return np.exp(self.intercept + self.slope * np.log(abscissa))


def fit_exponent(abscissa: np.ndarray, steps: np.ndarray) -> Exponent:
    """The exponent of T in another quantity, with its spread over seeds.

    Args:
      abscissa: ε, m, I or B, positive.
      steps: T, (abscissae, seeds). An abscissa is left out if T is infinite for one of its seeds.

    Returns:
      The exponent; NaN if fewer than two abscissae are left.

    Example:
      >>> at = np.array([0.1, 0.2, 0.4])
      >>> fit_exponent(at, 5 * at[:, None] ** -3 * np.array([[1.0, 2.0]])).slope.__round__(6)
      -3.0
    """
    abscissa, steps = np.asarray(abscissa, float), np.asarray(steps, float)
    if steps.shape[:1] != abscissa.shape or steps.ndim != 2:
        raise ValueError(f"steps must have a row per abscissa, got {steps.shape} for {abscissa.shape}")
    kept = np.isfinite(steps).all(1)
    if kept.sum() < 2:
        return Exponent(math.nan, math.nan, math.nan, math.nan, int(kept.sum()))
    lines = np.polyfit(np.log(abscissa[kept]), np.log(steps[kept]), 1)
    slopes, seeds = lines[0], steps.shape[1]
    error = float(stats.sem(slopes)) if seeds > 1 else math.nan
    half = error * float(stats.t.ppf(0.975, seeds - 1)) if seeds > 1 else math.nan
    return Exponent(float(slopes.mean()), error, half, float(lines[1].mean()), int(kept.sum()))
