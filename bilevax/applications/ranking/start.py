"""Where the thresholds and ranks of a model start: near what they are, not at zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.stream import Stream
from bilevax.applications.ranking.lists import Lists
from bilevax.applications.ranking.models import list_scores
from bilevax.applications.ranking.objective import Query, focused
from bilevax.applications.ranking.ratings import Ratings

PyTree = Any

_USERS, _PAIRS = 256, 4096  # looked at together


def start_levels(
    problem: Problem, model: Any, x: PyTree, key: Array, negatives: int = 300
) -> dict[str, Array]:
    """Estimates of every pair's rank and every user's threshold, from one list per user.

    A pair's estimate is unbiased without a focus: two strata and the own term exact, as in a step. A user's
    threshold is the weighted quantile of its list at K of N items.

    Args:
      problem: made by `make_problem`.
      model: scores items.
      x: its parameters.
      key: a random key.
      negatives: how many of a list.

    Returns:
      y0 for the methods: "rank" and, where the problem has it, "threshold".
    """
    (lists,) = problem.lower_data
    assert isinstance(lists, Lists)
    ratings, queries = lists.ratings, problem.blocks
    stream = Stream.start(key)

    def of_users(group: Array) -> tuple[Any, ...]:
        users = jnp.minimum(group * _USERS + jnp.arange(_USERS), ratings.users - 1)
        batch = lists.draw(stream.at(group), users, negatives).rows
        scores = jax.vmap(lambda one: list_scores(model, x, one))(batch)
        counts = None
        if queries.focus is not None:
            counts = jax.vmap(focused)(scores[:, batch.slot.shape[1] :], queries.focus[users])
        return scores, batch.slot, batch.real, batch.owned, counts

    groups = -(-ratings.users // _USERS)
    parts = jax.lax.map(of_users, jnp.arange(groups))
    scores, slots, real, owned, counts = jax.tree.map(
        lambda a: a.reshape(groups * _USERS, *a.shape[2:])[: ratings.users], parts
    )
    out = {"rank": _ranks(model, x, ratings, queries, scores, slots, real, counts)}
    if "threshold" in problem.levels:
        out["threshold"] = jax.vmap(_quantile, in_axes=(0, 0, 0, 0, None))(
            scores, real, owned, queries.cutoff, ratings.item_count
        )
    return out


def _ranks(
    model: Any,
    x: PyTree,
    ratings: Ratings,
    queries: Query,
    scores: Array,
    slots: Array,
    real: Array,
    counts: Array | None,
) -> Array:
    """The rank of every pair among the items of its user's list, weighted; and 1 behind the last pair."""
    places = slots.shape[1]
    owners = jnp.repeat(
        jnp.arange(ratings.users), jnp.diff(ratings.offsets), total_repeat_length=ratings.pairs
    )

    def of_pairs(group: Array) -> Array:
        pairs = jnp.minimum(group * _PAIRS + jnp.arange(_PAIRS), ratings.pairs - 1)

        def one(pair: Array) -> Array:
            user = owners[pair]
            surrogate = jax.tree.map(lambda a: a[user], queries.surrogate)
            own = model.score(x, user, ratings.items[pair][None])[0]
            above = surrogate(scores[user] - own)
            others = real[user] & (slots[user] != pair)
            owned = ratings.offsets[user + 1] - ratings.offsets[user]
            among = jnp.sum(jnp.where(others, above[:places], 0)) / jnp.maximum(jnp.sum(others), 1)
            beyond = jnp.mean(above[places:] if counts is None else counts[user] * above[places:])
            rivals = queries.rivals[user] * (owned - 1)
            return surrogate.own + rivals * among + (ratings.item_count - owned) * beyond

        return jax.vmap(one)(pairs)

    groups = -(-ratings.pairs // _PAIRS)
    ranks = jax.lax.map(of_pairs, jnp.arange(groups)).reshape(-1)[: ratings.pairs]
    return jnp.concatenate([ranks, jnp.ones(1, ranks.dtype)])


def _quantile(scores: Array, real: Array, owned: Array, cutoff: Array, item_count: int) -> Array:
    """The score above which a list says that `cutoff` of all items lie."""
    places = real.shape[0]
    positive = owned / jnp.sum(real)
    negative = (item_count - owned) / (scores.shape[0] - places)
    weight = jnp.concatenate([jnp.where(real, positive, 0), jnp.full(scores.shape[0] - places, negative)])
    order = jnp.argsort(-scores)
    above = jnp.cumsum(weight[order])
    return scores[order][jnp.minimum(jnp.searchsorted(above, cutoff), scores.shape[0] - 1)]
