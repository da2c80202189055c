"""Partial AUC and average precision as problems of many blocks: one block per positive row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx

PyTree = Any
Score = Callable[[PyTree, PyTree], Array]

_QUANTILE_ROWS = 20_000  # negatives whose scores say where thresholds start
_CHUNK = 4_096  # rows that are scored at a time


def squared_hinge(margin: Array) -> Array:
    """max(1 − margin, 0)²."""
    return jnp.maximum(1 - margin, 0) ** 2


def logistic(margin: Array) -> Array:
    """log(1 + exp(−margin))."""
    return jax.nn.softplus(-margin)


def sigmoid(margin: Array) -> Array:
    """1 / (1 + exp(margin)): a comparison, smoothed."""
    return jax.nn.sigmoid(-margin)


# What a pair of rows costs, by the difference of their scores.
SURROGATES: dict[str, Callable[[Array], Array]] = {
    "squared_hinge": squared_hinge,
    "logistic": logistic,
    "sigmoid": sigmoid,
}


def linear_score(x: Array, rows: Array) -> Array:
    """The scores of rows, ⟨row, x⟩."""
    return rows @ x


def partial_auc(
    positives: PyTree,
    negatives: PyTree,
    *,
    max_fpr: float = 0.1,
    surrogate: str = "squared_hinge",
    score: Score = linear_score,
    ridge: float = 0.0,
) -> bx.Problem:
    r"""One minus the one-way partial AUC, up to a false positive rate, by a surrogate loss of pairs.

    The part of the ROC curve up to the rate ρ compares every positive row with the ρ hardest of the negative
    rows. The mean of the largest losses is a CVaR, and its threshold minimises it (Rockafellar and Uryasev):

    .. math::
        \min_x \frac1m \sum_i \min_{s_i} \; s_i + \frac1{\rho\,n} \sum_j
            \max\bigl(\ell(h(x; p_i) - h(x; q_j)) - s_i, 0\bigr) + \tfrac{r}{2} \|x\|^2

    Block i is the positive row :math:`p_i`; its own variable is the threshold :math:`s_i`, a
    `bilevax.minimum`. With ρ = 1 the objective is that of the whole AUC.

    Args:
      positives: rows of the positive class, a pytree of arrays with a leading axis; at least one.
      negatives: rows of the negative class, alike.
      max_fpr: ρ in (0, 1].
      surrogate: ℓ, "squared_hinge", "logistic" or "sigmoid".
      score: h(x, rows), a vector with the score of every row.
      ridge: r.

    Returns:
      The problem; `thresholds(…)` is a y0 for it.

    Example:
      >>> import jax.numpy as jnp, bilevax as bx
      >>> from bilevax.applications.auc import partial_auc
      >>> problem = partial_auc(jnp.array([[1.0], [3.0]]), jnp.array([[0.0], [1.0], [2.0]]), max_fpr=0.5)
      >>> problem.count
      2
    """
    if not isinstance(max_fpr, (int, float, np.number)) or not 0 < max_fpr <= 1:
        raise ValueError(f"max_fpr must be a number above 0 and at most 1, got {max_fpr!r}")
    loss = _surrogate(surrogate)

    def upper(x: PyTree, y: Array, block: PyTree, batch: PyTree) -> Array:
        losses = loss(_one(score, x, block) - score(x, batch))
        return y + jnp.mean(jax.nn.relu(losses - y)) / max_fpr + penalty(ridge, x)

    # Losses are not negative, so that no threshold need be.
    return bx.Problem(upper, bx.minimum(project=(0.0, None)), positives, bx.Shared(negatives))


def thresholds(
    x: PyTree,
    positives: PyTree,
    negatives: PyTree,
    *,
    max_fpr: float = 0.1,
    surrogate: str = "squared_hinge",
    score: Score = linear_score,
) -> Array:
    """The thresholds of `partial_auc` at x, one per positive row.

    All surrogates fall with the margin, so that the hardest negatives are those of the highest scores,
    whatever the positive row.

    Args:
      x: where.
      positives: as in `partial_auc`.
      negatives: alike; of very many, some are used.
      max_fpr: alike.
      surrogate: alike.
      score: alike.

    Returns:
      s_i for every positive row.
    """
    loss = _surrogate(surrogate)
    count = jax.tree.leaves(negatives)[0].shape[0]
    some = np.linspace(0, count - 1, min(count, _QUANTILE_ROWS)).astype(int)
    values = scores(score, x, jax.tree.map(lambda a: a[some], negatives))
    place = min(int(np.ceil(max_fpr * len(some))), len(some)) - 1
    hardest = np.sort(values)[::-1][place]
    return loss(jnp.asarray(scores(score, x, positives)) - hardest)


def average_precision(
    positives: PyTree,
    negatives: PyTree,
    *,
    surrogate: str = "sigmoid",
    score: Score = linear_score,
    ridge: float = 0.0,
) -> bx.Problem:
    r"""One minus the average precision, by a surrogate loss of pairs (SOAP).

    The precision at the rank of a positive row is the share of positives among the rows above it. With ℓ in
    place of a comparison,

    .. math::
        \min_x 1 - \frac1m \sum_i \frac{m\,u_i}{m\,u_i + n\,w_i} + \tfrac{r}{2} \|x\|^2, \qquad
        u_i = \frac1m \sum_k \ell(h(p_i) - h(p_k)), \quad w_i = \frac1n \sum_j \ell(h(p_i) - h(q_j))

    Block i is the positive row :math:`p_i`; its two means are two levels, "positives" and "negatives", so
    that each draws rows of its own class: with few positives a common batch would hardly contain any.

    Args:
      positives: rows of the positive class, a pytree of arrays with a leading axis.
      negatives: rows of the negative class, alike.
      surrogate: ℓ, "squared_hinge" (SOAP's own), "logistic" or "sigmoid". The first two are unbounded: they
        also reward positive rows for being far from one another, which does not help the ranking.
      score: h(x, rows), a vector with the score of every row.
      ridge: r.

    Returns:
      The problem; it needs no y0.

    Reference:
      Qi et al., *Stochastic Optimization of Areas Under Precision-Recall Curves with Provable Convergence*,
      NeurIPS 2021.
    """
    loss = _surrogate(surrogate)
    count, others = (jax.tree.leaves(rows)[0].shape[0] for rows in (positives, negatives))

    def mean_loss(x: PyTree, block: PyTree, batch: PyTree) -> Array:
        return jnp.mean(loss(_one(score, x, block) - score(x, batch)))

    def upper(x: PyTree, y: dict[str, Array], block: PyTree, batch: PyTree) -> Array:
        above = others * y["negatives"]
        return above / (count * y["positives"] + above) + penalty(ridge, x)

    # A positive row is among those that it is compared with, though not in every batch.
    least = float(loss(jnp.zeros(()))) / count
    return bx.Problem(
        upper,
        {"positives": bx.mean(mean_loss, lower=least), "negatives": bx.mean(mean_loss)},
        positives,
        lower_data={"positives": bx.Shared(positives), "negatives": bx.Shared(negatives)},
    )


def scores(score: Score, x: PyTree, rows: PyTree) -> np.ndarray:
    """The scores of many rows, some at a time."""
    compiled = jax.jit(score)
    count = jax.tree.leaves(rows)[0].shape[0]
    parts = [
        np.asarray(compiled(x, jax.tree.map(lambda a, first=first: a[first : first + _CHUNK], rows)))
        for first in range(0, count, _CHUNK)
    ]
    return np.concatenate(parts)


def penalty(ridge: float, x: PyTree) -> Array:
    """r/2 ‖x‖² of all entries."""
    return 0.5 * ridge * sum((jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x)), jnp.zeros(()))


def _one(score: Score, x: PyTree, row: PyTree) -> Array:
    """The score of one row."""
    return score(x, jax.tree.map(lambda a: a[None], row))[0]


def _surrogate(name: str) -> Callable[[Array], Array]:
    if name not in SURROGATES:
        raise ValueError(f"surrogate must be one of {list(SURROGATES)}, got {name!r}")
    return SURROGATES[name]
