"""Whether a stationary point is the optimum that it should be, by the curvature there."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._step.linear_algebra import one_by_one
from bilevax._truth.roots import DENSE, largest_derivative


def is_curved_right(
    slope: Callable[[Array], Array],
    y: Array,
    signs: Array | None = None,
    project: Callable[[Array], Array] | None = None,
) -> Array:
    """Whether a function is convex in what minimises it and concave in what maximises it, where y is free.

    A flat direction passes. Where the matrix is too large, the answer is yes.

    Args:
      slope: the gradient, with the sign changed of what maximises.
      y: a stationary point.
      signs: 1 for entries that minimise, −1 for those that maximise; by default all minimise.
      project: onto the set that y must stay in, if any.
    """
    if y.size > DENSE:
        return jnp.ones((), bool)
    matrix, one = jax.jacfwd(slope)(y), jnp.eye(y.size, dtype=y.dtype)
    if signs is not None:
        matrix = jnp.where(signs[:, None] == signs, matrix, 0)
    if project is not None:
        size = largest_derivative(slope, y)
        size = jnp.where(size > 0, size, 1)
        # P H P + (1 − P²)/γ, which is H in the directions in which y is free, and positive in the others.
        # A projection onto a convex set is a gradient: its derivative P is symmetric.
        part = jax.jacfwd(project)(y - slope(y) / size)
        matrix = part @ matrix @ part + size * (one - part @ part)
    rounding = 100 * float(jnp.finfo(y.dtype).eps) * jnp.max(jnp.abs(matrix))
    shifted = (matrix + matrix.T) / 2 + rounding * one
    return jnp.all(jnp.isfinite(one_by_one(jnp.linalg.cholesky)(shifted)))
