"""Rows times a vector, in the fastest form for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax import Array

from bilevax._problem.drawn import product

if TYPE_CHECKING:
    from jaxtyping import Float


def dot(rows: Float[Array, "n d"], vector: Float[Array, " d *k"]) -> Float[Array, " n *k"]:
    """`rows @ vector`, in the fastest form for the rows that a step draws for every block.

    A step multiplies a few rows of every visited block with one or two vectors. A CPU is fastest with matrix
    products. An accelerator's matrix units expect more columns, so there the product is a plain sum, which
    the compiler fuses with the drawing of the rows; and where a step draws some ten thousand rows or more,
    an NVIDIA GPU has kernels that fetch the rows as they are stored (`_problem/row_kernels.py`). For these
    f and g must pass the rows on as they were given them. Where all blocks share the same rows (in an
    evaluation on all of them), use `@`: the products of all blocks are then one matrix product.

    Args:
      rows: (n, d), floating point.
      vector: (d,), or a matrix (d, k); then it is a matrix product on every device.

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
    return product(rows, vector)
