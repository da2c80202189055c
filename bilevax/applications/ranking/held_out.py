"""Held-out items, in groups of users whose scores fit the memory, with the pairs that rankings leave out."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.ranking.ratings import Ratings

_SCORES_AT_ONCE = {"cpu": 2**20, "other": 2**23}  # of a group of users; a hidden layer is 64 times as large


class Held(eqx.Module):
    """Held-out items in groups of users, with the pairs that the rankings leave out.

    Attributes:
      users: (groups, size) users; the last group is padded with user 0.
      items: (groups, size, H) held-out items, padded with item 0.
      values: their ratings.
      real: which of them are items, not padding.
      excluded_rows: (groups, L) the row within the group of every pair to leave out; `size` is padding.
      excluded_items: (groups, L) the item of that pair.
      sampled: (groups, size, n) stored items to rank against; None ranks against all items.
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
        """Which items are ranked: "full ranking", or the number of sampled items."""
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
      held: the pairs to find; users without any are left out of every mean.
      seen: the pairs that rankings leave out: the training pairs and, for a test, the development pairs.
      sampled: None ranks all items. A number ranks against this many stored random items that the user has
        not rated, as the released code does: the results are far higher and not comparable.
      seed: of the stored items.
      group: users at a time; by default a million scores on a CPU, eight million elsewhere.

    Returns:
      The argument `held` of `evaluate`.

    Raises:
      ValueError: the parts have different users or items, or a held-out pair was seen.
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
    size = bx.checks.whole_number("group", group, 1)
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
        raise ValueError("held-out pairs must not be among the seen pairs, got pairs in both")
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
        count = bx.checks.whole_number("sampled", sampled, 1)
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
    """Every pair as one integer, ascending."""
    return ratings.owners() * np.int64(ratings.item_count) + np.asarray(ratings.items)


def _contains(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(ascending, wanted), len(ascending) - 1)
    return ascending[place] == wanted


def _stored_negatives(users: np.ndarray, rated: np.ndarray, items: int, count: int, seed: int) -> np.ndarray:
    """Random items that each user has not rated; distinct if there are enough."""
    rng = np.random.default_rng(seed)
    taken: dict[int, list[int]] = {}
    for code in rated:
        taken.setdefault(int(code // items), []).append(int(code % items))
    out = np.zeros((len(users), count), np.int32)
    for row, user in enumerate(users):
        free = np.setdiff1d(np.arange(items), taken.get(int(user), []))
        if len(free) == 0:
            raise ValueError(f"user {user} has rated every item: no item is left to rank against")
        out[row] = rng.choice(free, size=count, replace=len(free) < count)
    return out
