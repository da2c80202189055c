"""Metrics of a ranking of all items that were not seen in training.

Ranks are counted, not sorted: the rank of a held-out item is one plus the number of candidates that score at
least as high. Ties count against the model: other items always go first, and among held-out items the less
relevant. Scores are computed for a group of users at a time and never leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.ranking.held_out import Held
from bilevax.applications.ranking.models import all_scores
from bilevax.applications.ranking.objective import checked_model
from bilevax.applications.ranking.ratings import gain

PyTree = Any

METRICS = ("ndcg", "recall", "mrr", "hit", "map")


def evaluate(model: Any, x: PyTree, held: Held, cutoffs: Sequence[int] = (10, 20, 50)) -> dict[str, Array]:
    """The metrics of every user with held-out items. The function is pure and works under jit and vmap.

    NDCG@k = DCG@k / ideal DCG@k with gains 2^r − 1, where the ideal ranks the held-out items first. Recall@k
    is the share of held-out items among the first k, hit@k is 1 if there is one, MRR@k is one over the rank
    of the first one. MAP@k sums the precision at each held-out item found, over min(k, held-out items).

    Args:
      model: scores items.
      x: its parameters.
      held: made by `hold_out`.
      cutoffs: the values of k.

    Returns:
      By name ("ndcg@10", …) a vector over all users; NaN for users without held-out items.

    Raises:
      ValueError: a cutoff exceeds the number of items.
    """
    (metrics,) = evaluate_parts(model, x, [held], cutoffs)
    return metrics


def evaluate_parts(
    model: Any, x: PyTree, parts: Sequence[Held], cutoffs: Sequence[int] = (10, 20, 50)
) -> list[dict[str, Array]]:
    """`evaluate` for several held-out parts of the same users; every score is computed once.

    Args:
      model: scores items.
      x: its parameters.
      parts: made by `hold_out`, for example of development and test data, with groups of the same size.
      cutoffs: the values of k.

    Returns:
      The metrics of every part.

    Raises:
      ValueError: a cutoff exceeds the number of items, or the parts have different users or groups. Under jit
        only the sizes of groups are compared.
    """
    for part in parts:
        for k in cutoffs:
            bx.checks.whole_number("every cutoff", k, 1, part.item_count)
        _check_same_users(parts[0], part)
    tables = jax.lax.map(
        lambda some: [_group_metrics(one, cutoffs) for one in some], _group_ranks(model, x, tuple(parts))
    )
    return [_by_user(part, table) for part, table in zip(parts, tables, strict=True)]


def _check_same_users(one: Held, other: Held) -> None:
    same = one.users.shape == other.users.shape and one.item_count == other.item_count
    same = same and (one.sampled is None) == (other.sampled is None)
    if same and not bx.checks.is_traced(one.users) and not bx.checks.is_traced(other.users):
        same = np.array_equal(one.users, other.users)
    if not same:
        raise ValueError(
            "parts must hold out items of the same users, in the same groups and by the same protocol, got "
            f"users of shapes {one.users.shape} and {other.users.shape}"
        )


def _by_user(held: Held, table: dict[str, Array]) -> dict[str, Array]:
    out = {}
    users, some = held.users.reshape(-1), held.real.any(-1).reshape(-1)
    for name, column in table.items():
        # The padding of the last group goes to an extra place after the last user.
        where = jnp.where(some, users, held.user_count)
        spread = jnp.full(held.user_count + 1, jnp.nan, column.dtype)
        out[name] = spread.at[where].set(column.reshape(-1))[:-1]
    return out


def summarize(per_user: dict[str, Any]) -> dict[str, float]:
    """The mean of every metric over the users that have it."""
    return {name: float(np.nanmean(np.asarray(column))) for name, column in per_user.items()}


@eqx.filter_jit
def mean_metrics(
    model: Any, x: PyTree, parts: tuple[Held, ...], cutoffs: tuple[int, ...]
) -> list[dict[str, Array]]:
    """Means over users of every part, compiled."""
    found = evaluate_parts(model, x, parts, cutoffs)
    return [{name: jnp.nanmean(column) for name, column in one.items()} for one in found]


class _Ranked(eqx.Module):
    ranks: Array
    values: Array
    real: Array


def _group_ranks(model: Any, x: PyTree, parts: tuple[Held, ...]) -> list[_Ranked]:
    """The ranks of all held-out items, group by group."""
    checked_model(model)
    item_count = parts[0].item_count

    def full(parts: tuple[Held, ...]) -> list[Array]:
        scores = all_scores(model, x, parts[0].users, item_count)
        # A diverged model must not come first: NaN ranks last.
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        return [ranked(scores, part) for part in parts]

    def ranked(scores: Array, part: Held) -> Array:
        own = jnp.take_along_axis(scores, part.items, axis=1)
        scores = scores.at[part.excluded_rows, part.excluded_items].set(-jnp.inf, mode="drop")
        rows = jnp.arange(part.users.shape[0])[:, None]
        # Held-out items are compared with each other separately, since their ties go by gain.
        scores = scores.at[rows, jnp.where(part.real, part.items, item_count)].set(-jnp.inf, mode="drop")
        return _counted(scores, own) + _among(own, part)

    def marked(parts: tuple[Held, ...]) -> list[Array]:
        return [one_marked(part) for part in parts]

    def one_marked(part: Held) -> Array:
        assert part.sampled is not None
        listed = jnp.concatenate([part.items, part.sampled], axis=1)
        scores = jax.vmap(lambda user, items: model.score(x, user, items))(part.users, listed)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        own = scores[:, : part.items.shape[1]]
        return _counted(scores[:, part.items.shape[1] :], own) + _among(own, part)

    ranks = jax.lax.map(full if parts[0].sampled is None else marked, parts)
    return [_Ranked(one, part.values, part.real) for one, part in zip(ranks, parts, strict=True)]


def _counted(scores: Array, own: Array) -> Array:
    """One plus the number of a row's scores that are at least `own`, for each of them."""

    def one(own: Array) -> Array:
        return 1 + jnp.sum(scores >= own[:, None], axis=1, dtype=jnp.int32)

    if own.shape[1] <= 16:
        return jnp.stack([one(own[:, place]) for place in range(own.shape[1])], axis=1)
    return jax.lax.map(one, own.T).T


def _among(own: Array, part: Held) -> Array:
    """How many held-out items precede each: those with higher scores; on ties, the less relevant first."""
    mine, other = own[:, :, None], own[:, None, :]
    place = jnp.arange(own.shape[1])
    worse = part.values[:, None, :] < part.values[:, :, None]
    same = (part.values[:, None, :] == part.values[:, :, None]) & (place[None, :] < place[:, None])
    before = (other > mine) | ((other == mine) & (worse | same))
    return jnp.sum(before & part.real[:, None, :], axis=2, dtype=jnp.int32)


def _group_metrics(part: _Ranked, cutoffs: Sequence[int]) -> dict[str, Array]:
    ranks, real = part.ranks, part.real
    gains = jnp.where(real, gain(part.values), 0)
    best = -jnp.sort(-gains, axis=1)
    place = jnp.arange(ranks.shape[1])
    count = jnp.sum(real, axis=1)
    nearer = (ranks[:, None, :] <= ranks[:, :, None]) & real[:, None, :]
    precision = jnp.sum(nearer, axis=2) / ranks
    out = {}
    for k in cutoffs:
        found = real & (ranks <= k)
        dcg = jnp.sum(jnp.where(found, gains / jnp.log2(1.0 + ranks), 0), axis=1)
        ideal = jnp.sum(jnp.where(place < k, best / jnp.log2(place + 2.0), 0), axis=1)
        hits = jnp.sum(found, axis=1)
        first = jnp.min(jnp.where(found, ranks, jnp.iinfo(jnp.int32).max), axis=1)
        out[f"ndcg@{k}"] = dcg / jnp.where(ideal > 0, ideal, 1)
        out[f"recall@{k}"] = hits / jnp.maximum(count, 1)
        out[f"mrr@{k}"] = jnp.where(hits > 0, 1 / first, 0)
        out[f"hit@{k}"] = (hits > 0).astype(gains.dtype)
        out[f"map@{k}"] = jnp.sum(jnp.where(found, precision, 0), axis=1) / jnp.clip(count, 1, k)
    return out
