r"""Top-K NDCG as a bilevel problem: a threshold per user, and a rank per relevant pair.

For user q with N items, n_q of them relevant, scores s and gains 2^r − 1,

.. math::
    \min_x -\frac1m \sum_q \sum_{i \text{ relevant}}
        \frac{\psi((s_i - \lambda_q)/T)\,(2^{r_i} - 1)}{Z_q^K \log_2(1 + \text{rank}_{q,i})}

where :math:`\lambda_q` is the smoothed K-th largest score of the user, an argmin level,

.. math::
    \lambda_q = \arg\min_\lambda \frac{K + \varepsilon}{N} \lambda + \frac{\tau_2}{2} \lambda^2
        + \frac1N \sum_j \tau_1 \ln(1 + e^{(s_j - \lambda)/\tau_1})

and :math:`\text{rank}_{q,i} = \sum_j \ell(s_j - s_i)` a mean level. Both sums run over all N items. A list of
P positives and B negatives estimates them as two strata with their true weights, n_q and N − n_q; the
item's own term is exact. Without the thresholds (ψ = 1) the problem is that of SONG.

Reference:
  Qiu et al., *Large-scale Stochastic Optimization of NDCG Surrogates for Deep Learning with Provable
  Convergence*, ICML 2022; Hu et al., ICML 2023, Section "Top-K NDCG Optimization".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.levels import argmin, mean
from bilevax._problem.problem import Problem
from bilevax._util import checks
from bilevax.applications.ranking.discounts import Discount, Logarithmic
from bilevax.applications.ranking.lists import List, Lists, stratum_weights
from bilevax.applications.ranking.models import list_scores
from bilevax.applications.ranking.ratings import Ratings, gain
from bilevax.applications.ranking.surrogates import SquaredHinge, Surrogate

PyTree = Any


class Query(eqx.Module):
    """The constants of one user (and, with a leading axis, of all): numbers of the problem, not code.

    Attributes:
      ideal: Z_q^K.
      total: the sum of the gains of the user's pairs.
      evenness: e; the loss is divided by ideal^(1−|e|), and by total^e if e is positive.
      cutoff: K + ε.
      softness: τ₁.
      ridge: τ₂.
      gate: T, the width of ψ.
      rivals: what another pair of the user counts in a rank.
      focus: a, by which items at the top of the list count more in a rank (`focused`); None if all count
        alike.
      surrogate: ℓ.
      discount: what a pair at a rank is worth.
    """

    ideal: Array
    total: Array
    evenness: Array
    cutoff: Array
    softness: Array
    ridge: Array
    gate: Array
    rivals: Array
    focus: Array | None
    surrogate: Surrogate
    discount: Discount


def make_queries(
    ratings: Ratings,
    cutoff: int | None,
    surrogate: Surrogate,
    softness: Any = 0.1,
    ridge: Any = 1e-4,
    gate: Any = 1.0,
    evenness: Any = 0.0,
    rivals: Any = 1.0,
    focus: Any = None,
    discount: Discount | None = None,
) -> Query:
    """The constants of all users; cutoff None ranks without a threshold (SONG).

    Raises:
      ValueError: if the cutoff is not below the number of items.
    """
    if cutoff is not None:
        checks.whole_number("cutoff", cutoff, 1)
        if cutoff >= ratings.item_count:
            raise ValueError(
                f"cutoff must be less than the number of items {ratings.item_count}, got {cutoff}"
            )
    for name, value in (("softness", softness), ("ridge", ridge), ("gate", gate)):
        checks.coefficient(name, value, optional=False)
    check_evenness(evenness)
    checks.coefficient("rivals", rivals, high=1.0, zero=True, optional=False)
    checks.coefficient("focus", focus, zero=True)
    ideal, total = jnp.asarray(ratings.ideal(cutoff)), jnp.asarray(ratings.total_gain())

    def of_all(value: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, ideal.dtype), ideal.shape)

    top = float(ratings.item_count if cutoff is None else cutoff) + 0.5
    return Query(
        ideal,
        total,
        of_all(evenness),
        of_all(top),
        of_all(softness),
        of_all(ridge),
        of_all(gate),
        of_all(rivals),
        None if focus is None else of_all(focus),
        jax.tree.map(of_all, surrogate),
        jax.tree.map(of_all, Logarithmic() if discount is None else discount),
    )


def make_problem(
    ratings: Ratings,
    model: Any,
    *,
    cutoff: int | None = 300,
    surrogate: Surrogate | None = None,
    positives: int = 10,
    softness: Any = 0.1,
    ridge: Any = 1e-4,
    gate: Any = 1.0,
    evenness: Any = 0.0,
    rivals: Any = 1.0,
    focus: Any = None,
    discount: Discount | None = None,
) -> Problem:
    """The bilevel problem of top-K NDCG, for `bx.minimize(…, batch_size=negatives)`.

    Args:
      ratings: the training pairs.
      model: scores items: `NeuMF`, `MF`, or any object with `score(x, user, items)`.
      cutoff: K; None leaves out the thresholds, and gives SONG's problem.
      surrogate: ℓ, left out `SquaredHinge()`.
      positives: P, the pairs of a user in a list.
      softness: τ₁ > 0, in units of scores.
      ridge: τ₂ > 0, the strong convexity of the threshold's problem.
      gate: T > 0, the width of ψ in units of scores.
      evenness: e from −3 to 1: how evenly users weigh. 0 is NDCG. NDCG sums over pairs, and users with many
        of them weigh more, as Z grows less than their number. For e > 0 the loss of a user is divided by
        Z^(1−e) (Σ gains)^e: 1 is the mean discount of a user's pairs, weighted with their gains. For e < 0 it
        is divided by Z^(1+e): −1 is DCG, where pairs of equal gain and rank weigh alike, whosever they are;
        below that those of users with many pairs weigh more.
      rivals: from 0 to 1: what the user's other pairs count in a pair's rank. 1 is the rank among all items,
        0 that among the items that the user has not rated, by which recommendations are judged.
      focus: a ≥ 0. In a rank the p-th of a list's negatives then counts in proportion to (p − ½)^(−a), one
        in the mean: what stands at the top of the list, where it is seen, weighs more. The weights are not
        differentiated. With None all count alike, and the estimates of the ranks are unbiased.
      discount: what a pair at a rank is worth, left out `Logarithmic()`, NDCG's; or `Power(depth, last)`.

    Returns:
      A problem whose blocks are users, with the lower levels "rank" (a slot per pair and one behind them, for
      padding) and, if there is a cutoff, "threshold" (a slot per user).

    Raises:
      TypeError: if the model has no `score`.
      ValueError: if a number is out of range.
    """
    checked_model(model)
    surrogate = SquaredHinge() if surrogate is None else surrogate
    queries = make_queries(
        ratings, cutoff, surrogate, softness, ridge, gate, evenness, rivals, focus, discount
    )
    levels: dict[str, Any] = {
        "rank": mean(Rank(ratings.item_count), slots=pair_slots, count=ratings.pairs + 1)
    }
    if cutoff is not None:
        levels["threshold"] = argmin(Threshold(ratings.item_count))
    return Problem(
        upper=loss,
        lower=levels,
        blocks=queries,
        upper_data="rank",
        lower_data=Lists(ratings, positives),
        through=ListScores(model),
    )


def check_evenness(evenness: Any) -> None:
    """A number from −3 to 1."""
    checks.coefficient("evenness", evenness, low=-3.0, high=1.0, zero=True, optional=False)


def checked_model(model: Any) -> Any:
    """The model, if it can score."""
    if not callable(getattr(model, "score", None)):
        raise TypeError(f"model must have a method score(x, user, items), got {type(model).__name__}")
    return model


def pair_slots(query: Query, batch: List) -> Array:
    """The pairs that a list touches."""
    return batch.slot


@dataclasses.dataclass(frozen=True)
class ListScores:
    """What the problem sees of x: the scores of a list."""

    model: Any

    def __call__(self, x: PyTree, query: Query, batch: List) -> Array:
        return list_scores(self.model, x, batch)


def loss(scores: Array, y: dict[str, Array], query: Query, batch: List) -> Array:
    """f: minus the user's smoothed NDCG, estimated from the positives of a list."""
    # An estimate with error correction can fall below what a rank can be.
    rank = jnp.maximum(y["rank"], query.surrogate.own)
    terms = gain(batch.rating) * query.discount(rank)
    if "threshold" in y:
        terms = terms * jax.nn.sigmoid((scores[: batch.places] - y["threshold"]) / query.gate)
    drawn = jnp.sum(batch.real)
    evenness = query.evenness
    best = query.ideal ** (1 - jnp.abs(evenness)) * query.total ** jnp.maximum(evenness, 0)
    return -(batch.owned / drawn) * jnp.sum(jnp.where(batch.real, terms, 0)) / best


@dataclasses.dataclass(frozen=True)
class Rank:
    """c: the smoothed ranks of a list's positives among all items."""

    item_count: int

    def __call__(self, scores: Array, query: Query, batch: List) -> Array:
        return estimated_ranks(scores, query.surrogate, batch, self.item_count, query.rivals, query.focus)


def estimated_ranks(
    scores: Array,
    surrogate: Surrogate,
    batch: List,
    item_count: int,
    rivals: Any = 1.0,
    focus: Array | None = None,
) -> Array:
    """The ranks of a list's positives among all items: two strata, and the own term exact.

    rank_i ≈ ℓ(own) + ρ (n−1)/(p−1) Σ_{positives j ≠ i} ℓ(s_j − s_i) + (N−n)/B Σ_{negatives} κ_j ℓ(s_j − s_i)

    κ = 1 without a focus: then it is an unbiased estimate of the rank. Else κ is `focused`.
    """
    places = batch.places
    positive, negative = scores[:places], scores[places:]
    drawn = jnp.sum(batch.real)
    others = batch.real[None, :] & ~jnp.eye(places, dtype=bool)
    rival = jnp.where(others, surrogate(positive[None, :] - positive[:, None]), 0)
    among = rivals * (batch.owned - 1) / jnp.maximum(drawn - 1, 1) * jnp.sum(rival, axis=1)
    _, weight = stratum_weights(batch, item_count)
    above = surrogate(negative[None, :] - positive[:, None])
    if focus is not None:
        above = focused(negative, focus) * above
    return surrogate.own + among + weight * jnp.sum(above, axis=1)


def focused(negative: Array, focus: Array) -> Array:
    """κ: what each negative of a list counts in a rank: (p − ½)^(−a) at place p, one in the mean.

    Equal scores share the best of their places. Places are counted, and have no derivative.
    """
    higher = jnp.sum(negative[None, :] > negative[:, None], axis=1)
    weight = (higher + 0.5) ** -focus
    return weight / jnp.mean(weight)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """g: what the smoothed K-th largest score minimises."""

    item_count: int

    def __call__(self, scores: Array, y: Array, query: Query, batch: List) -> Array:
        excess = query.softness * jax.nn.softplus((scores - y) / query.softness)
        positive, negative = stratum_weights(batch, self.item_count)
        weight = jnp.where(jnp.arange(scores.shape[0]) < batch.places, positive, negative)
        real = jnp.concatenate([batch.real, jnp.ones(scores.shape[0] - batch.places, bool)])
        total = jnp.sum(jnp.where(real, weight * excess, 0))
        return (query.cutoff * y + total) / self.item_count + 0.5 * query.ridge * y**2
