"""Coefficients of a method: numbers, schedules, and dicts of them by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax
from jax import Array

from bilevax._util.per_entry import PerEntry

Coefficient = float | Callable[[Array], Array] | PerEntry | Mapping[str, Any]
LowerStep = Coefficient | optax.GradientTransformation

FIRST_STEP = np.zeros((), np.int32)  # t = 0, on the host


def evaluate(value: Any, step: Any, level: str | None = None) -> Any:
    """A coefficient at a step, for a level: numbers, schedules, and dicts of them by level."""
    if isinstance(value, Mapping):
        value = value.get(level)
    return value(step) if callable(value) else value


def evaluate_all(values: Mapping[str, Any], step: Any, level: str) -> dict[str, Any]:
    """All coefficients of a method at a step, for a level; optax transformations stay as they are."""
    return {
        name: value if isinstance(value, optax.GradientTransformation) else evaluate(value, step, level)
        for name, value in values.items()
    }


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
