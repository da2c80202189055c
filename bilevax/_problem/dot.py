"""Rows times a vector, as the machine does it best."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def dot(rows: Array, vector: Array) -> Array:
    """`rows @ vector`, in the form that suits rows that a step has drawn for every block.

    A step takes many small products, of some rows of a block with one vector or two. A CPU does them best as
    products of matrices. The tiles of an accelerator's are made for more columns than that: there it is a sum
    of products, into which the drawing of the rows is merged. Where all blocks share the same rows (all of
    them, in an evaluation), use `@`: their products are one product of two matrices.

    Args:
      rows: (n, d), floating point.
      vector: (d,), or a matrix (d, k), with which it is a product of matrices on every machine.

    Returns:
      What `rows @ vector` returns.

    Raises:
      ValueError: if the rows are not as wide as the vector is long.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> bx.dot(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1.0, 10.0])).tolist()
      [21.0, 43.0]
    """
    if rows.shape[-1:] != vector.shape[:1]:
        raise ValueError(
            f"rows must be as wide as vector is long, got shapes {rows.shape} and {vector.shape}"
        )
    if vector.ndim != 1 or jax.default_backend() == "cpu":
        return rows @ vector
    return jnp.sum(rows * vector, axis=-1)
