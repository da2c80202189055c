"""How good a ranking is: every item that was not seen in training competes.

Ranks are counted, not sorted: the rank of a held-out item is one plus how many candidates score at least as
high. Ties count against us: with other items always, and among held-out items the less relevant goes first.
Scores are made for some users at a time and never leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._util import checks
from bilevax.applications.ranking.models import all_scores
from bilevax.applications.ranking.objective import checked_model
from bilevax.applications.ranking.ratings import Ratings, gain

PyTree = Any

METRICS = ("ndcg", "recall", "mrr", "hit", "map")
_SCORES_AT_ONCE = {"cpu": 2**20, "other": 2**23}  # of a group of users; a hidden layer is 64 times as large


class Held(eqx.Module):
    """Held-out items in groups of users, with what is left out of each user's ranking.

    Attributes:
      users: (groups, size) users; the last group is padded with user 0.
      items: (groups, size, H) held-out items, padded with item 0.
      values: their ratings.
      real: which of them are items, not padding.
      excluded_rows: (groups, L) the row within the group of every pair to leave out; `size` is padding.
      excluded_items: (groups, L) its item.
      sampled: (groups, size, n) stored items that compete instead of all; None for the full ranking.
    """

    users: Array
    items: Array
    values: Array
    real: Array
    excluded_rows: Array
    excluded_items: Array
    sampled: Array | None
    user_count: int = eqx.field(static=True)
    item_count: int = eqx.field(static=True)

    @property
    def protocol(self) -> str:
        """Who competes: "full ranking", or a marked number of sampled items."""
        return "full ranking" if self.sampled is None else f"{self.sampled.shape[-1]} sampled negatives"


def hold_out(
    held: Ratings,
    seen: Sequence[Ratings],
    *,
    sampled: int | None = None,
    seed: int = 0,
    group: int | None = None,
) -> Held:
    """Prepares held-out pairs for `evaluate`: once, on the host.

    Args:
      held: the pairs to be found; users without any are left out of every mean.
      seen: what is left out of the rankings: the training pairs, and for a test also the development pairs.
      sampled: None ranks all items. A number ranks against so many stored random items that the user has not
        rated, the protocol of the released code: its figures are far higher, and not to be compared.
      seed: of the stored items.
      group: users at a time; left out, as many as make a million scores on a CPU, eight million elsewhere.

    Returns:
      What `evaluate` takes.

    Raises:
      ValueError: if the parts have different users or items, or if a held-out pair was seen.
    """
    for part in seen:
        if (part.users, part.item_count) != (held.users, held.item_count):
            raise ValueError(
                f"seen must have the {held.users} users and {held.item_count} items of held, got "
                f"{part.users} and {part.item_count}"
            )
    lengths = np.diff(np.asarray(held.offsets))
    users = np.flatnonzero(lengths).astype(np.int32)
    if group is None:
        at_once = _SCORES_AT_ONCE.get(jax.default_backend(), _SCORES_AT_ONCE["other"])
        group = max(1, min(len(users), at_once // held.item_count))
    size = checks.whole_number("group", group, 1)
    groups = -(-len(users) // size)
    padded = np.zeros(groups * size, np.int32)
    padded[: len(users)] = users
    row_of = np.full(held.users, -1, np.int32)
    row_of[users] = np.arange(len(users), dtype=np.int32)

    longest = held.longest
    shape = (groups * size, longest)
    items, values, real = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, bool)
    rows = row_of[held.owners()]
    place = np.arange(held.pairs) - np.asarray(held.offsets)[held.owners()]
    items[rows, place], values[rows, place], real[rows, place] = held.items, held.values, True

    codes = [_codes(part) for part in seen]
    own = _codes(held)
    if any(_contains(part, own).any() for part in codes):
        raise ValueError("held-out pairs must not be among the seen ones, got pairs in both")
    rows = np.concatenate([row_of[part.owners()] for part in seen] or [row_of[:0]])
    left_out = np.concatenate([np.asarray(part.items) for part in seen] or [row_of[:0]])
    order = np.argsort(rows, kind="stable")
    # Users without held-out pairs come first.
    order = order[np.searchsorted(rows, np.int32(0), sorter=order) :]
    left_out = left_out[order]
    group_of, row = np.divmod(rows[order], np.int32(size))
    counts = np.bincount(group_of, minlength=groups)
    most = max(1, int(counts.max(initial=1)))
    excluded_rows = np.full((groups, most), size, np.int32)
    excluded_items = np.zeros((groups, most), np.int32)
    spot = np.arange(len(row)) - np.r_[0, np.cumsum(counts)][group_of]
    excluded_rows[group_of, spot], excluded_items[group_of, spot] = row, left_out

    stored = None
    if sampled is not None:
        count = checks.whole_number("sampled", sampled, 1)
        stored = _stored_negatives(padded, np.concatenate([*codes, own]), held.item_count, count, seed)
        stored = jnp.asarray(stored.reshape(groups, size, count))
    return Held(
        jnp.asarray(padded.reshape(groups, size)),
        jnp.asarray(items.reshape(groups, size, longest)),
        jnp.asarray(values.reshape(groups, size, longest)),
        jnp.asarray(real.reshape(groups, size, longest)),
        jnp.asarray(excluded_rows),
        jnp.asarray(excluded_items),
        stored,
        held.users,
        held.item_count,
    )


def _codes(ratings: Ratings) -> np.ndarray:
    """Every pair as one number, ascending."""
    return ratings.owners() * np.int64(ratings.item_count) + np.asarray(ratings.items)


def _contains(ascending: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    return ascending[place] == numbers


def evaluate(model: Any, x: PyTree, held: Held, cutoffs: Sequence[int] = (10, 20, 50)) -> dict[str, Array]:
    """The metrics of every user with held-out items, and none for the others: pure, for jit and vmap.

    With gains 2^r − 1 and the ideal made of the held-out items, NDCG@k = DCG@k / ideal DCG@k; recall@k is the
    share of held-out items in the first k, hit@k whether there is one, MRR@k one over the first one's rank,
    and MAP@k the mean of the precision at each held-out item found, over min(k, how many there are).

    Args:
      model: scores items.
      x: its parameters.
      held: what `hold_out` made.
      cutoffs: the k.

    Returns:
      "ndcg@10" and so on, each a vector over all users, NaN for users without held-out items.

    Raises:
      ValueError: if a cutoff exceeds the number of items.
    """
    (metrics,) = evaluate_parts(model, x, [held], cutoffs)
    return metrics


def evaluate_parts(
    model: Any, x: PyTree, parts: Sequence[Held], cutoffs: Sequence[int] = (10, 20, 50)
) -> list[dict[str, Array]]:
    """`evaluate` for several held-out parts of the same users, with every score made once.

    Args:
      model: scores items.
      x: its parameters.
      parts: what `hold_out` made of each, development and test for example, in groups of the same size.
      cutoffs: the k.

    Returns:
      The metrics of every part.

    Raises:
      ValueError: if a cutoff exceeds the number of items, or the parts have other users or groups (under jit,
        where users cannot be compared: groups of other sizes).
    """
    for part in parts:
        for k in cutoffs:
            checks.whole_number("every cutoff", k, 1, part.item_count)
        _check_same_users(parts[0], part)
    tables = jax.lax.map(
        lambda some: [_group_metrics(one, cutoffs) for one in some], _group_ranks(model, x, tuple(parts))
    )
    return [_by_user(part, table) for part, table in zip(parts, tables, strict=True)]


def _check_same_users(one: Held, other: Held) -> None:
    same = one.users.shape == other.users.shape and one.item_count == other.item_count
    same = same and (one.sampled is None) == (other.sampled is None)
    if same and not checks.is_traced(one.users) and not checks.is_traced(other.users):
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
        # The padding of the last group goes to a place behind the last user.
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
        # A model that has diverged must not come first: NaN loses against everything.
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        return [ranked(scores, part) for part in parts]

    def ranked(scores: Array, part: Held) -> Array:
        own = jnp.take_along_axis(scores, part.items, axis=1)
        scores = scores.at[part.excluded_rows, part.excluded_items].set(-jnp.inf, mode="drop")
        rows = jnp.arange(part.users.shape[0])[:, None]
        # Held-out items compete among themselves apart, where ties can be told by their gains.
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
    """One plus how many of a row's scores are at least each of `own`."""

    def one(own: Array) -> Array:
        return 1 + jnp.sum(scores >= own[:, None], axis=1, dtype=jnp.int32)

    if own.shape[1] <= 16:
        return jnp.stack([one(own[:, place]) for place in range(own.shape[1])], axis=1)
    return jax.lax.map(one, own.T).T


def _among(own: Array, part: Held) -> Array:
    """How many held-out items go before each: higher scores, and on ties the worse (then the earlier)."""
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


def _stored_negatives(users: np.ndarray, rated: np.ndarray, items: int, count: int, seed: int) -> np.ndarray:
    """Random items that each user has not rated, distinct where there are enough."""
    rng = np.random.default_rng(seed)
    taken: dict[int, list[int]] = {}
    for code in rated:
        taken.setdefault(int(code // items), []).append(int(code % items))
    out = np.zeros((len(users), count), np.int32)
    for row, user in enumerate(users):
        free = np.setdiff1d(np.arange(items), taken.get(int(user), []))
        if len(free) == 0:
            raise ValueError(f"user {user} has rated every item: nothing is left to rank against")
        out[row] = rng.choice(free, size=count, replace=len(free) < count)
    return out
