r"""Top-K NDCG as a bilevel problem: a threshold per user, and a rank per relevant pair.

For user q with N items, n_q of them relevant, scores s and gains 2^r − 1,

.. math::
    \min_x -\frac1m \sum_q \sum_{i \text{ relevant}}
        \frac{\psi((s_i - \lambda_q)/T)\,(2^{r_i} - 1)}{Z_q^K \log_2(1 + \text{rank}_{q,i})}

where :math:`\lambda_q` is the smoothed K-th largest score of the user, an argmin level,

.. math::
    \lambda_q = \arg\min_\lambda \frac{K + \varepsilon}{N} \lambda + \frac{\tau_2}{2} \lambda^2
        + \frac1N \sum_j \tau_1 \ln(1 + e^{(s_j - \lambda)/\tau_1})

and :math:`\text{rank}_{q,i} = \sum_j \ell(s_j - s_i)` is a mean level. Both sums run over all N items. A list
of P positives and B negatives estimates them as two strata with their true weights, n_q and N − n_q; the
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

import bilevax as bx
from bilevax.applications.ranking.discounts import Discount, Logarithmic
from bilevax.applications.ranking.lists import List, Lists, item_weights, stratum_weights
from bilevax.applications.ranking.models import list_scores, user_tables, with_user_row
from bilevax.applications.ranking.ratings import Ratings, for_all_users, gain
from bilevax.applications.ranking.surrogates import SquaredHinge, Surrogate

PyTree = Any


class Query(eqx.Module):
    """The constants of one user or, with a leading axis, of all users.

    Attributes:
      ideal: Z_q^K.
      total: the sum of the gains of the user's pairs.
      cutoff: K + ε.
      softness, ridge, gate, evenness, rivals, focus, surrogate, discount: those of `SmoothedNDCG`.
    """

    ideal: Array
    total: Array
    cutoff: Array
    softness: Array
    ridge: Array
    gate: Array
    evenness: Array
    rivals: Array
    focus: Array | None
    surrogate: Surrogate
    discount: Discount


@dataclasses.dataclass(frozen=True)
class SmoothedNDCG:
    """The smoothed top-K NDCG that `make_problem` optimizes. All but `cutoff` may be traced arrays.

    Attributes:
      cutoff: K; None leaves out the thresholds, which is SONG's problem.
      surrogate: ℓ; by default `SquaredHinge()`.
      softness: τ₁ > 0, in units of scores.
      ridge: τ₂ > 0, the strong convexity of the threshold's problem.
      gate: T > 0, the width of ψ in units of scores.
      evenness: e from −3 to 1: how evenly users weigh. 0 is NDCG. NDCG sums over pairs, and users with many
        pairs weigh more, as Z grows more slowly than their number. For e > 0 the loss of a user is divided by
        Z^(1−e) (Σ gains)^e: 1 is the mean discount of a user's pairs, weighted with their gains. For e < 0 it
        is divided by Z^(1+e): −1 is DCG, where pairs of equal gain and rank weigh the same, whichever user
        they belong to; below −1, pairs of users with many pairs weigh more.
      rivals: from 0 to 1: how much the user's other pairs count in a pair's rank. 1 is the rank among all
        items, 0 the rank among items that the user has not rated, as recommendations are judged.
      focus: a ≥ 0. The p-th best of a list's negatives counts in a rank in proportion to (p − ½)^(−a), 1 on
        average: items at the top of the list weigh more. The weights are not differentiated. With None all
        negatives count the same, and the estimates of ranks are unbiased.
      discount: the worth of a pair at a rank; by default `Logarithmic()`, as in NDCG.

    Raises:
      TypeError, ValueError: a value is of another kind, or out of range.
    """

    cutoff: int | None = 300
    surrogate: Surrogate = dataclasses.field(default_factory=SquaredHinge)
    softness: Any = 0.1
    ridge: Any = 1e-4
    gate: Any = 1.0
    evenness: Any = 0.0
    rivals: Any = 1.0
    focus: Any = None
    discount: Discount = dataclasses.field(default_factory=Logarithmic)

    def __post_init__(self) -> None:
        if self.cutoff is not None:
            bx.checks.whole_number("cutoff", self.cutoff, 1)
        for name in ("softness", "ridge", "gate"):
            check_constant(name, getattr(self, name))
        check_evenness(self.evenness)
        check_constant("rivals", self.rivals, high=1.0, zero=True)
        check_constant("focus", self.focus, zero=True, optional=True)

    def constants(self, users: int) -> dict[str, Any]:
        """The fields of `Query` that are the same for all users."""
        names = ("softness", "ridge", "gate", "evenness", "rivals", "focus", "surrogate", "discount")
        return for_all_users({name: getattr(self, name) for name in names}, users)


def make_queries(ratings: Ratings, objective: SmoothedNDCG) -> Query:
    """The constants of all users.

    Raises:
      ValueError: the cutoff is not below the number of items.
    """
    cutoff = objective.cutoff
    if cutoff is not None and cutoff >= ratings.item_count:
        raise ValueError(f"cutoff must be less than the number of items {ratings.item_count}, got {cutoff}")
    top = (ratings.item_count if cutoff is None else cutoff) + 0.5
    return Query(
        ideal=jnp.asarray(ratings.ideal(cutoff)),
        total=jnp.asarray(ratings.total_gain()),
        cutoff=for_all_users(top, ratings.users),
        **objective.constants(ratings.users),
    )


def make_problem(
    ratings: Ratings,
    model: Any,
    objective: SmoothedNDCG | None = None,
    *,
    positives: int = 10,
    lazy: bool = False,
) -> bx.Problem:
    """The bilevel problem of top-K NDCG, for `bx.minimize(…, batch_size=negatives)`.

    Args:
      ratings: the training pairs.
      model: scores items: `NeuMF`, `MF`, or any object with `score(x, user, items)`.
      objective: the smoothed NDCG; by default `SmoothedNDCG()`.
      positives: P, the pairs of a user in a list.
      lazy: whether users' vectors are tables, which a step touches where it looks them up if the solver's
        upper step is plain or `bx.lazy_adam`.

    Returns:
      A problem whose blocks are users. Its lower levels are "rank" (a slot per pair, and one after them for
      padding) and, if there is a cutoff, "threshold" (a slot per user).

    Raises:
      TypeError: the model has no `score`.
      ValueError: the cutoff is not below the number of items, or the model does not name its tables.
    """
    checked_model(model)
    objective = SmoothedNDCG() if objective is None else objective
    levels: dict[str, Any] = {
        "rank": bx.mean(Rank(ratings.item_count), slots=pair_slots, count=ratings.pairs + 1, distinct=True)
    }
    if objective.cutoff is not None:
        levels["threshold"] = bx.argmin(Threshold(ratings.item_count))
    return bx.Problem(
        upper=loss,
        lower=levels,
        blocks=make_queries(ratings, objective),
        upper_data="rank",
        lower_data=Lists(ratings, positives),
        through=ListScores(model, lazy),
        tables=user_tables(model, lazy),
    )


def check_constant(name: str, value: Any, *, optional: bool = False, **bounds: Any) -> None:
    """Raises unless a value is a number within bounds, and no schedule: it is a constant of the problem."""
    if callable(value):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    bx.checks.coefficient(name, value, optional=optional, **bounds)


def check_evenness(evenness: Any) -> None:
    """Raises unless the evenness is a number from −3 to 1."""
    check_constant("evenness", evenness, low=-3.0, high=1.0, zero=True)


def checked_model(model: Any) -> Any:
    """The model, after a check that it can score."""
    if not callable(getattr(model, "score", None)):
        raise TypeError(f"model must have a method score(x, user, items), got {type(model).__name__}")
    return model


def pair_slots(query: Query, batch: List) -> Array:
    """The pairs that a list touches."""
    return batch.slot


@dataclasses.dataclass(frozen=True)
class ListScores:
    """The scores of a list, through which the problem depends on x."""

    model: Any
    lazy: bool = False

    def __call__(self, x: PyTree, query: Query, batch: List) -> Array:
        if self.lazy:
            x, batch = with_user_row(self.model, x, batch)
        return list_scores(self.model, x, batch)


def loss(scores: Array, y: dict[str, Array], query: Query, batch: List) -> Array:
    """f: minus the user's smoothed NDCG, estimated from the positives of a list."""
    # An estimate with error correction can fall below the smallest possible rank.
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
    """The ranks of a list's positives among all items: two strata, and an exact own term.

    rank_i ≈ ℓ(own) + ρ (n−1)/(p−1) Σ_{positives j ≠ i} ℓ(s_j − s_i) + (N−n)/B Σ_{negatives} κ_j ℓ(s_j − s_i)

    Without a focus κ = 1, and the estimate is unbiased. With a focus κ is `focused`.
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
    """κ, the weight of each negative of a list in a rank: (p − ½)^(−a) at place p, 1 on average.

    Equal scores share the best of their places. Places are counted and have no derivative.
    """
    higher = jnp.sum(negative[None, :] > negative[:, None], axis=1)
    weight = (higher + 0.5) ** -focus
    return weight / jnp.mean(weight)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """g: its minimiser is the smoothed K-th largest score."""

    item_count: int

    def __call__(self, scores: Array, y: Array, query: Query, batch: List) -> Array:
        excess = query.softness * jax.nn.softplus((scores - y) / query.softness)
        total = jnp.sum(item_weights(batch, self.item_count) * excess)
        return (query.cutoff * y + total) / self.item_count + 0.5 * query.ridge * y**2
