"""Sums of squares of groups on an accelerator.

On a CPU a small product per group is fastest (`sums`). An accelerator would wait for the host at every one of
them: here rows go to it in pieces of one shape, as the user has them, and are standardised, multiplied and
added up there. The sums stay on the device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.applications.grouped.panel import Panel

_ENTRIES = 2**26  # of the products of the rows of a piece


def on_accelerator() -> bool:
    """Whether arrays are on something else than the host's processor."""
    return jax.default_backend() != "cpu"


def device_sums(panel: Panel, first: int, after: int, size: int) -> Array:
    """Σ a (r, t)(r, t)ᵀ over the rows of groups `first` to `after`, (size, d + 1, d + 1); those of groups
    beyond are zero. To be called with double precision enabled."""
    d = panel.size
    step = max(_ENTRIES // (d + 1) ** 2, 1)
    low, high = int(panel.offsets[first]), int(panel.offsets[after])
    owner = np.repeat(np.arange(after - first, dtype=np.int32), np.diff(panel.offsets[first : after + 1]))
    shift, scale = np.zeros(d), np.ones(d)
    if panel.scaling is not None:
        shift, scale = panel.scaling.shift, panel.scaling.scale
    total = jnp.zeros((size, d + 1, d + 1))
    for begin in range(low, high, step):
        rows = slice(begin, min(begin + step, high))
        X = panel.X[rows] if panel.order is None else panel.X[panel.order[rows]]
        arrays = X, panel.target[rows], panel.weight[rows], owner[begin - low : rows.stop - low]
        padded = (np.pad(one, [(0, step - len(one))] + [(0, 0)] * (one.ndim - 1)) for one in arrays[:3])
        # Rows that fill up have no weight; owners ascend.
        whose = np.pad(arrays[3], (0, step - len(X)), mode="edge")
        total = _added(total, *padded, whose, shift, scale, panel.scaling is not None)
    return total


@functools.partial(jax.jit, static_argnums=7, donate_argnums=0)
def _added(
    total: Array,
    X: Array,
    target: Array,
    weight: Array,
    owner: Array,
    shift: Array,
    scale: Array,
    scaled: bool,
) -> Array:
    """The sums with those of a piece of rows; rows that are scaled begin with a one that X does not have."""
    rows = (X - shift) / scale
    parts = [jnp.ones((len(X), 1))] if scaled else []
    both = jnp.concatenate([*parts, rows, target[:, None]], 1)
    products = (weight[:, None] * both)[:, :, None] * both[:, None, :]
    return total + jax.ops.segment_sum(products, owner, len(total), indices_are_sorted=True)
