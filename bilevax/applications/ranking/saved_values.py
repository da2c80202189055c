"""Checks of what a recommender's file holds: parameters, epoch and history."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx


def parameters(model: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The stored parameters of a model, in its own precision.

    Raises:
      ValueError: the arrays do not fit the model.
    """
    expected = jax.eval_shape(model.start, jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in expected.items()}
    if {name: array.shape for name, array in arrays.items()} != shapes:
        raise ValueError(f"{type(model).__name__} must have parameters of the shapes {shapes}, got others")
    if not all(np.issubdtype(array.dtype, np.floating) for array in arrays.values()):
        raise ValueError("the parameters must be floating arrays, got others")
    return {name: jnp.asarray(arrays[name], leaf.dtype) for name, leaf in expected.items()}


def epoch(value: Any) -> float:
    """The stored epoch of the parameters.

    Raises:
      TypeError, ValueError: it is no number from 0.
    """
    bx.checks.number("best_epoch", value, 0.0)
    return float(value)


def history(entries: Any) -> bx.History:
    """The stored history: a list of numbers by name.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("the history must be a list of entries, got something else")
    for entry in entries:
        for name, value in entry.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
            if not whole and not isinstance(value, float):
                raise ValueError(f"the history must hold numbers, got {name} = {value!r}")
    return bx.History(entries)
