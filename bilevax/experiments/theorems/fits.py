"""Exponents: straight lines through logarithms, one per seed, and how far seeds scatter."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc


@dataclasses.dataclass(frozen=True)
class Exponent:
    """The slope of log T over log of something.

    Attributes:
      slope: the mean over seeds.
      error: its standard error.
      half_width: of its 95% confidence interval, by Student's t.
      intercept: log T where the logarithm is zero.
      points: how many abscissae the fit uses.
    """

    slope: float
    error: float
    half_width: float
    intercept: float
    points: int

    def __str__(self) -> str:
        return f"{self.slope:.2f} ± {self.half_width:.2f}" if self.points > 1 else ""

    def at(self, abscissa: np.ndarray) -> np.ndarray:
        """The fitted line."""
        return np.exp(self.intercept + self.slope * np.log(abscissa))


def fit_exponent(abscissa: np.ndarray, steps: np.ndarray) -> Exponent:
    """The exponent of T in something, with its spread over seeds.

    Args:
      abscissa: ε, m, I or B, positive.
      steps: T, (abscissae, seeds). Abscissae at which some seed did not get there are left out.

    Returns:
      The exponent; not a number if fewer than two abscissae are left.

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
    error = float(slopes.std(ddof=1) / math.sqrt(seeds)) if seeds > 1 else math.nan
    half = error * student_quantile(0.975, seeds - 1) if seeds > 1 else math.nan
    return Exponent(float(slopes.mean()), error, half, float(lines[1].mean()), int(kept.sum()))


def student_quantile(chance: float, freedom: int) -> float:
    """The quantile of Student's t distribution, above the median, by bisection.

    Example:
      >>> student_quantile(0.975, 7).__round__(2)
      2.36
    """

    def below(t: float) -> float:
        return 1 - 0.5 * float(betainc(freedom / 2, 0.5, jnp.asarray(freedom / (freedom + t * t))))

    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < chance else (low, middle)
    return low
