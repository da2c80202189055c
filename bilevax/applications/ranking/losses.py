r"""Plain losses over one user's list, without a lower level: the baselines of the bilevel methods.

A list has P positives with ratings r and gains 2^r − 1, and B negatives with rating 0. Pairs of two negatives
never count, so that pairwise losses cost P × (P + B), not (P + B)².

Tests compare them with `rax`, for those that `rax` has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import bilevax as bx
from bilevax.applications.ranking.lists import List, Lists, top_threshold
from bilevax.applications.ranking.models import list_scores, user_tables, with_user_row
from bilevax.applications.ranking.neural_sort import relaxed_sort
from bilevax.applications.ranking.objective import check_constant, check_evenness, checked_model
from bilevax.applications.ranking.ratings import Ratings, for_all_users, gain

PyTree = Any


class Listing(eqx.Module):
    """The constants of one user's list loss.

    Attributes:
      temperature: T; scores are divided by it.
      cutoff: K, for losses with a cutoff.
      item_count: N.
      evenness: e; the loss of a list is multiplied by n^((1−e)/2), where n is the number of the user's pairs.
    """

    temperature: Array
    cutoff: Array
    item_count: Array
    evenness: Array


class Scored(eqx.Module):
    """A list with its scores; padding has the score −∞."""

    scores: Array
    rating: Array
    real: Array
    batch: List

    @property
    def places(self) -> int:
        """P."""
        return self.batch.places


Loss = Callable[[Scored, Listing], Array]


def softmax(scored: Scored, listing: Listing) -> Array:
    """Softmax cross-entropy with equal weights for all positives."""
    return _cross_entropy(scored, _shares(scored, jnp.ones_like(scored.rating)), listing)


def gain_softmax(scored: Scored, listing: Listing) -> Array:
    """Softmax cross-entropy, positives weighted with their gains."""
    return _cross_entropy(scored, _shares(scored, gain(scored.rating)), listing)


def listnet(scored: Scored, listing: Listing) -> Array:
    """ListNet: the cross-entropy of the softmax of scores relative to the softmax of ratings."""
    target = jax.nn.softmax(jnp.where(scored.real, scored.rating, -jnp.inf))
    return _cross_entropy(scored, target, listing)


def listmle(scored: Scored, listing: Listing) -> Array:
    """ListMLE: minus the log-likelihood that the positives come first, by rating."""
    order = jnp.argsort(-jnp.where(scored.real, scored.rating, -1.0), stable=True)
    sorted_scores = (scored.scores / listing.temperature)[order]
    # The log of the sum of exponentials from each place to the end of the list.
    rest = jax.lax.associative_scan(jnp.logaddexp, sorted_scores, reverse=True)
    positive = (scored.real & (jnp.arange(order.shape[0]) < scored.places))[order]
    return jnp.sum(jnp.where(positive, rest - jnp.where(positive, sorted_scores, 0), 0)) / jnp.sum(positive)


def ranknet(scored: Scored, listing: Listing) -> Array:
    """RankNet: the logistic loss of every pair of unequal ratings."""
    loss, counts = _pairs(scored, listing)
    return jnp.sum(jnp.where(counts, loss, 0)) / jnp.maximum(jnp.sum(counts), 1)


def bpr(scored: Scored, listing: Listing) -> Array:
    """BPR: the logistic loss of every positive with every negative."""
    loss, counts = _pairs(scored, listing)
    counts = counts & (jnp.arange(counts.shape[1]) >= scored.places)
    return jnp.sum(jnp.where(counts, loss, 0)) / jnp.maximum(jnp.sum(counts), 1)


def lambdarank(scored: Scored, listing: Listing) -> Array:
    """LambdaRank: RankNet's pairs, each weighted by how much a swap of the two changes the list's NDCG."""
    loss, counts = _pairs(scored, listing)
    ranks = _list_ranks(scored)
    gains, discount = gain(scored.rating), 1 / jnp.log2(1 + ranks)
    change = jnp.abs(gains[: scored.places, None] - gains[None, :])
    change = change * jnp.abs(discount[: scored.places, None] - discount[None, :])
    weight = jax.lax.stop_gradient(change) / _ideal(scored)
    return jnp.sum(jnp.where(counts, weight * loss, 0))


def approx_ndcg(scored: Scored, listing: Listing) -> Array:
    """ApproxNDCG: minus the list's NDCG, ranks replaced by 1 + Σ sigmoid of differences."""
    scores = scored.scores / listing.temperature
    positive = jnp.where(scored.real[: scored.places], scores[: scored.places], 0)
    above = jax.nn.sigmoid(scores[None, :] - positive[:, None])
    others = scored.real[None, :] & (
        jnp.arange(scored.places)[:, None] != jnp.arange(scores.shape[0])[None, :]
    )
    ranks = 1 + jnp.sum(jnp.where(others, above, 0), axis=1)
    gains = jnp.where(scored.real, gain(scored.rating), 0)[: scored.places]
    return -jnp.sum(gains / jnp.log2(1 + ranks)) / _ideal(scored)


def neural_ndcg(scored: Scored, listing: Listing) -> Array:
    """NeuralNDCG: minus the NDCG of gains that a relaxed permutation matrix (NeuralSort) has sorted."""
    scores = jnp.where(
        scored.real, scored.scores, jnp.min(jnp.where(scored.real, scored.scores, jnp.inf)) - 1
    )
    gains = jnp.where(scored.real, gain(scored.rating), 0)
    placed = relaxed_sort(scores, listing.temperature) @ gains
    return -jnp.sum(placed / jnp.log2(jnp.arange(gains.shape[0]) + 2.0)) / _ideal(scored)


def sl_at_k(scored: Scored, listing: Listing) -> Array:
    """SL@K: softmax loss of every positive, weighted by how far it is above the user's top-K threshold.

    The threshold is the list's weighted quantile at K of N items; the weights are not differentiated.
    """
    places, scores = scored.places, scored.scores
    threshold = top_threshold(scores, scored.batch, listing.cutoff, listing.item_count)
    own = jnp.where(scored.real[:places], scores[:places], 0)
    weights = jax.lax.stop_gradient(jax.nn.sigmoid((own - threshold) / listing.temperature))
    log_rest = jax.nn.logsumexp(scores / listing.temperature) - own / listing.temperature
    real = scored.real[:places]
    return jnp.sum(jnp.where(real, weights * log_rest, 0)) / jnp.sum(real)


LOSSES: dict[str, Loss] = {
    "softmax": softmax,
    "gain softmax": gain_softmax,
    "listnet": listnet,
    "listmle": listmle,
    "ranknet": ranknet,
    "lambdarank": lambdarank,
    "approx ndcg": approx_ndcg,
    "neural ndcg": neural_ndcg,
    "sl@k": sl_at_k,
    "bpr": bpr,
}


@dataclasses.dataclass(frozen=True)
class ListLoss:
    """f of a problem with an empty lower level: the loss of a user's list."""

    model: Any
    loss: Loss
    lazy: bool = False

    def __call__(self, x: PyTree, y: PyTree, listing: Listing, batch: List) -> Array:
        seen = with_user_row(self.model, x, batch) if self.lazy else (x, batch)
        loss = self.loss(score_list(list_scores(self.model, *seen), batch), listing)
        return batch.owned ** ((1 - listing.evenness) / 2) * loss


def score_list(scores: Array, batch: List) -> Scored:
    """A list's scores and ratings side by side."""
    negatives = scores.shape[0] - batch.places
    real = jnp.concatenate([batch.real, jnp.ones(negatives, bool)])
    rating = jnp.concatenate([batch.rating, jnp.zeros(negatives, batch.rating.dtype)])
    return Scored(jnp.where(real, scores, -jnp.inf), jnp.where(real, rating, 0), real, batch)


def make_list_problem(
    ratings: Ratings,
    model: Any,
    loss: str | Loss,
    *,
    positives: int = 10,
    temperature: Any = 1.0,
    cutoff: Any = 50,
    evenness: Any = 1.0,
    lazy: bool = False,
) -> bx.Problem:
    """A plain loss over lists as a problem, so that the loop of the bilevel methods can train it.

    Its one lower level is empty. `bx.SONG(upper_step, alpha=1.0, beta=1.0)` then follows the plain stochastic
    gradient.

    Args:
      ratings: the training pairs.
      model: scores items.
      loss: a name in `LOSSES`, or a function of (scored list, constants).
      positives: P, the pairs of a user in a list.
      temperature: T; scores are divided by it.
      cutoff: K, for losses with a cutoff ("sl@k").
      evenness: e from −3 to 1: how evenly users weigh. The loss of a list, a mean over its pairs or an NDCG,
        is multiplied by n^((1−e)/2), where n is the number of the user's pairs: with 1 all users weigh the
        same, with −1 all pairs.
      lazy: whether users' vectors are tables, as in `make_problem`.

    Returns:
      The problem.

    Raises:
      ValueError: the loss is unknown, or a value is out of range.
    """
    checked_model(model)
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {sorted(LOSSES)}, got {loss!r}")
        loss = LOSSES[loss]
    check_constant("temperature", temperature)
    check_evenness(evenness)
    constants = {
        "temperature": temperature,
        "cutoff": cutoff,
        "item_count": ratings.item_count,
        "evenness": evenness,
    }
    return bx.Problem(
        upper=ListLoss(model, loss, lazy),
        lower={"nothing": bx.mean(_nothing)},
        blocks=Listing(**for_all_users(constants, ratings.users)),
        upper_data=Lists(ratings, positives),
        tables=user_tables(model, lazy),
    )


def _nothing(x: PyTree, listing: Listing, batch: Any) -> Array:
    return jnp.zeros(())


def _shares(scored: Scored, worth: Array) -> Array:
    """The worth of the positives as shares of one; zero for negatives."""
    positive = scored.real & (jnp.arange(worth.shape[0]) < scored.places)
    worth = jnp.where(positive, worth, 0)
    return worth / jnp.maximum(jnp.sum(worth), 1e-9)


def _cross_entropy(scored: Scored, target: Array, listing: Listing) -> Array:
    """−Σ target · log softmax(scores)."""
    logs = jax.nn.log_softmax(scored.scores / listing.temperature)
    return -jnp.sum(jnp.where(scored.real, target * jnp.where(scored.real, logs, 0), 0))


def _pairs(scored: Scored, listing: Listing) -> tuple[Array, Array]:
    """The logistic loss of each positive with each item, and which items have a lower rating than it."""
    scores = jnp.where(scored.real, scored.scores, 0) / listing.temperature
    rating = scored.rating
    lower = rating[None, :] < rating[: scored.places, None]
    counts = lower & scored.real[None, :] & scored.real[: scored.places, None]
    return jax.nn.softplus(scores[None, :] - scores[: scored.places, None]), counts


def _list_ranks(scored: Scored) -> Array:
    order = jnp.argsort(-scored.scores, stable=True)
    return (
        jnp.zeros(order.shape, jnp.int32)
        .at[order]
        .set(jnp.arange(1, order.shape[0] + 1), unique_indices=True)
    )


def _ideal(scored: Scored) -> Array:
    """The DCG of the list in perfect order."""
    best = -jnp.sort(-jnp.where(scored.real, gain(scored.rating), 0)[: scored.places])
    total = jnp.sum(best / jnp.log2(jnp.arange(scored.places) + 2.0))
    return jnp.where(total > 0, total, 1)
