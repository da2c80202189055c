"""Many small positive definite systems at once, by elimination."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from bilevax.solvers.toolkit import solve as factorised

_LARGEST = 64  # unknowns, up to which elimination in step is faster than a factorisation per system


def solve(matrices: Array, right: Array) -> Array:
    """The solutions of positive definite systems.

    Every step of the elimination is one operation on all systems, which lie along the last axis. A
    factorisation per system has to be called for each of them, which takes far longer than its arithmetic.
    Positive definite matrices need no pivots.

    Args:
      matrices: (systems, d, d).
      right: (systems, d, k).

    Returns:
      (systems, d, k).
    """
    size = matrices.shape[-1]
    if size > _LARGEST:
        return factorised(matrices, right)
    both = jnp.moveaxis(jnp.concatenate([matrices, right], -1), 0, -1)

    def eliminate(place: Array, both: Array) -> Array:
        row = both[place] / both[place, place]
        return (both - both[:, place][:, None] * row).at[place].set(row)

    return jnp.moveaxis(jax.lax.fori_loop(0, size, eliminate, both)[:, size:], -1, 0)
