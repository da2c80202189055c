"""Checks of arguments; every message says what was expected and what was passed."""

from __future__ import annotations

from typing import Any, cast

import numpy as np


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most`.

    Raises:
      ValueError: it is of another type, or out of bounds.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and least <= value and (most is None or value <= most)):
        bounds = f"from {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {bounds}, got {value!r}")
    return int(value)


def number(name: str, value: Any, least: float, most: float) -> float:
    """A number from `least` to `most`.

    Raises:
      ValueError: it is of another type, not a number (nan), or out of bounds.
    """
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (real and least <= value <= most):
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return cast(float, value)  # an integer may be too large for a float


def generator(seed: Any) -> np.random.Generator:
    """A random number generator; the same seed gives the same numbers."""
    return np.random.default_rng(whole_number("seed", seed, 0))
