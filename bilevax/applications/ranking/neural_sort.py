r"""A differentiable sort: NeuralSort's relaxed permutation, made doubly stochastic by Sinkhorn scaling.

Row k of NeuralSort's matrix, for the k-th largest of n scores s, is

.. math:: \text{softmax}_j[((n + 1 - 2k) s_j - \sum_l |s_j - s_l|) / T]

Reference:
  Grover et al., *Stochastic Optimization of Sorting Networks via Continuous Relaxations*, ICLR 2019;
  Pobrotyn and Białobrzeski, *NeuralNDCG: Direct Optimisation of a Ranking Metric via Differentiable
  Relaxation of Sorting*, 2021.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_PASSES = 20


def relaxed_sort(scores: Array, temperature: Any, passes: int = _PASSES) -> Array:
    """The matrix whose row k marks the k-th largest score.

    Args:
      scores: n scores.
      temperature: T; as it falls to 0 the matrix becomes a permutation.
      passes: how many times columns and rows are scaled to sum to one.

    Returns:
      An n × n matrix of non-negative weights.

    Example:
      >>> import jax.numpy as jnp
      >>> from bilevax.applications.ranking.neural_sort import relaxed_sort
      >>> scores = jnp.array([1.0, 3.0, 2.0])
      >>> [round(float(value), 3) for value in relaxed_sort(scores, 0.01) @ scores]
      [3.0, 2.0, 1.0]
    """
    n = scores.shape[0]
    # Σ_l |s_j − s_l| from sorted sums: n log n rather than n².
    order = jnp.argsort(scores)
    ascending = scores[order]
    below = jnp.cumsum(ascending) - ascending
    place = jnp.arange(n)
    spread = (2 * place + 1 - n) * ascending - 2 * below + jnp.sum(ascending) - ascending
    distance = jnp.zeros_like(scores).at[order].set(spread, unique_indices=True)
    scaling = n + 1 - 2 * (place + 1)
    matrix = jax.nn.softmax((scaling[:, None] * scores[None, :] - distance[None, :]) / temperature, axis=1)

    scales: Any = _scales(matrix, passes)
    rows, columns = scales
    return rows[:, None] * matrix * columns[None, :]


class _Pass(NamedTuple):
    """The scales from before a pass, and what the pass multiplied with the matrix."""

    rows: Array
    columns: Array
    by_rows: Array
    by_columns: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scales(matrix: Array, passes: int) -> tuple[Array, Array]:
    """The factors of rows and columns after all passes, in each of which columns and then rows are scaled.

    A pass reads the matrix twice and writes vectors only. Neither is a matrix of a pass stored for the
    reverse one, nor is there a sum of matrices over passes: the gradient is one product in the end.
    """
    return _forward(matrix, passes)[0]


def _forward(matrix: Array, passes: int) -> tuple[tuple[Array, Array], tuple[Array, _Pass]]:
    def one(scales: tuple[Array, Array], _: Any) -> tuple[tuple[Array, Array], _Pass]:
        rows, columns = scales
        by_rows = _down(matrix, rows)
        new = _divided(columns, by_rows)
        by_columns = _across(matrix, new)
        return (_divided(rows, by_columns), new), _Pass(rows, columns, by_rows, by_columns)

    ones = jnp.ones_like(matrix[0])
    scales, stored = jax.lax.scan(one, (ones, ones), None, length=passes)
    return scales, (matrix, stored)


def _backward(passes: int, kept: tuple[Array, _Pass], slopes: tuple[Array, Array]) -> tuple[Array]:
    matrix, stored = kept

    def one(slopes: tuple[Array, Array], at: _Pass) -> tuple[tuple[Array, Array], Any]:
        columns, to_columns = jax.vjp(_divided, at.columns, at.by_rows)
        _, to_rows = jax.vjp(_divided, at.rows, at.by_columns)
        of_rows, of_product = to_rows(slopes[0])
        of_columns, of_other = to_columns(slopes[1] + _down(matrix, of_product))
        outer = jnp.stack([of_product, at.rows]), jnp.stack([columns, of_other])
        return (of_rows + _across(matrix, of_other), of_columns), outer

    _, (left, right) = jax.lax.scan(one, slopes, stored, reverse=True)
    n = matrix.shape[0]
    return (left.reshape(-1, n).T @ right.reshape(-1, n),)


_scales.defvjp(_forward, _backward)


def _divided(scales: Array, product: Array) -> Array:
    """The scales divided by their sums, scale · product; at most by 1e-10, and not where all is zero."""
    sums = scales * product
    return jnp.where(sums > 0, scales / jnp.maximum(sums, 1e-10), scales)


def _down(matrix: Array, rows: Array) -> Array:
    return jnp.sum(matrix * rows[:, None], axis=0)


def _across(matrix: Array, columns: Array) -> Array:
    return jnp.sum(matrix * columns[None, :], axis=1)
