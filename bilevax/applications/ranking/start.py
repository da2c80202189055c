"""First estimates of the thresholds and ranks of a model, so that a run does not start them at zero."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import bilevax as bx
from bilevax.applications.ranking.lists import Lists, top_threshold
from bilevax.applications.ranking.methods import BILEVEL
from bilevax.applications.ranking.models import list_scores
from bilevax.applications.ranking.objective import Query, focused
from bilevax.applications.ranking.ratings import Ratings

PyTree = Any

_USERS, _PAIRS = 256, 4096  # computed together


def first_levels(
    method: str, problem: bx.Problem, model: Any, x: PyTree, key: Array, negatives: int
) -> dict[str, Any]:
    """y0 of any method: `start_levels` for a bilevel one; the lower level of a plain loss is empty."""
    if method not in BILEVEL:
        return {"nothing": None}
    return eqx.filter_jit(start_levels)(problem, model, x, key, negatives)


def start_levels(
    problem: bx.Problem, model: Any, x: PyTree, key: Array, negatives: int = 300
) -> dict[str, Array]:
    """Estimates of every pair's rank and every user's threshold, from one list per user.

    Without a focus the estimate of a rank is unbiased: two strata and an exact own term, as in a step. A
    user's threshold is the weighted quantile of its list at K of N items.

    Args:
      problem: made by `make_problem`.
      model: scores items.
      x: its parameters.
      key: a random key.
      negatives: the number of negatives in a list.

    Returns:
      y0 for the methods: "rank" and, if the problem has that level, "threshold".
    """
    (lists,) = problem.lower_data
    assert isinstance(lists, Lists)
    ratings, queries = lists.ratings, problem.blocks
    stream = bx.Stream.start(key)

    def of_users(group: Array) -> tuple[Any, ...]:
        users = jnp.minimum(group * _USERS + jnp.arange(_USERS), ratings.users - 1)
        batch = lists.draw(stream.at(group), users, negatives).rows
        scores = jax.vmap(lambda one: list_scores(model, x, one))(batch)
        counts = None
        if queries.focus is not None:
            counts = jax.vmap(focused)(scores[:, batch.slot.shape[1] :], queries.focus[users])
        thresholds = None
        if "threshold" in problem.levels:
            thresholds = jax.vmap(top_threshold, in_axes=(0, 0, 0, None))(
                scores, batch, queries.cutoff[users], ratings.item_count
            )
        return scores, batch.slot, batch.real, counts, thresholds

    groups = -(-ratings.users // _USERS)
    parts = jax.lax.map(of_users, jnp.arange(groups))
    scores, slots, real, counts, thresholds = jax.tree.map(
        lambda a: a.reshape(groups * _USERS, *a.shape[2:])[: ratings.users], parts
    )
    ranks = _ranks(model, x, ratings, queries, scores, slots, real, counts)
    return {"rank": ranks} if thresholds is None else {"rank": ranks, "threshold": thresholds}


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
    """The rank of every pair, estimated from its user's list; and 1 for the slot after the last pair."""
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
