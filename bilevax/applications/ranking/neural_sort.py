r"""A differentiable sort: NeuralSort's relaxed permutation, made doubly stochastic by Sinkhorn scaling.

Row k of NeuralSort's matrix, for the k-th largest of n scores s, is

.. math:: \text{softmax}_j[((n + 1 - 2k) s_j - \sum_l |s_j - s_l|) / T]

Reference:
  Grover et al., *Stochastic Optimization of Sorting Networks via Continuous Relaxations*, ICLR 2019;
  Pobrotyn and Białobrzeski, *NeuralNDCG: Direct Optimisation of a Ranking Metric via Differentiable
  Relaxation of Sorting*, 2021.
"""

from __future__ import annotations

from typing import Any

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

    def scale(matrix: Array, _: Any) -> tuple[Array, None]:
        matrix = matrix / jnp.maximum(jnp.sum(matrix, axis=0, keepdims=True), 1e-10)
        return matrix / jnp.maximum(jnp.sum(matrix, axis=1, keepdims=True), 1e-10), None

    # Recomputed in the reverse pass: storing the divisors of every pass would fill the memory.
    return jax.lax.scan(jax.checkpoint(scale), matrix, None, length=passes)[0]
