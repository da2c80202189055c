"""A lower step with a scale for every entry of y."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np

from bilevax._util import checks


class PerEntry(eqx.Module):
    """A `lower_step` with a scale for every entry of y: y and v descend along `scales` times their gradient.

    `result.settings` holds the automatic step in this form.

    Args:
      step: τ.
      scales: arrays, shaped like the y of one block.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> solver = bx.BSVRBv2(lower_step=bx.PerEntry(0.1, jnp.array([1.0, 50.0])))
    """

    step: Any
    scales: Any

    def __check_init__(self) -> None:
        for name in ("step", "scales"):
            for leaf in jax.tree.leaves(getattr(self, name)):
                if not checks.is_traced(leaf) and np.any(np.asarray(leaf) < 0):
                    raise ValueError(f"{name} must not be negative, got {leaf}")
