"""Rows times a vector, as the machine does it best."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def dot(rows: Array, vector: Array) -> Array:
    """`rows @ vector`, in the form that is fastest inside of a step.

    A step takes many small products, of some rows of a block with one vector or two. A CPU does them best as
    products of matrices. The tiles of an accelerator's are made for more columns than that: there it is a sum
    of products, into which the drawing of the rows is merged.

    Args:
      rows: (n, d).
      vector: (d,), or a matrix (d, k), with which it is a product of matrices on every machine.

    Returns:
      What `rows @ vector` returns.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> bx.dot(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1.0, 10.0])).tolist()
      [21.0, 43.0]
    """
    if vector.ndim != 1 or jax.default_backend() == "cpu":
        return rows @ vector
    return jnp.sum(rows * vector, axis=-1)
