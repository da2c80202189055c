"""The ratings of all users as flat arrays on the device, grouped by user."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx

PyTree = Any

_MOST = 2**31 - 1  # items, and pairs: places are int32
_LARGEST = 30  # 2^r − 1 must stay far below the largest float


class Ratings(eqx.Module):
    """Rated pairs of a user and an item: user u owns the pairs offsets[u] to offsets[u + 1], sorted by item.

    Whatever is stored per pair is a flat vector aligned with `items` and `values`, never an array of
    users × items.

    Args:
      offsets: users + 1 ascending integers from 0 to the number of pairs.
      items: the item of every pair, in 0..item_count − 1; no user has an item twice.
      values: the rating of every pair, not negative.
      item_count: the number of items, rated or not.
      empty_users: whether users may have no pair, as in held-out data; in training data they may not.

    Raises:
      ValueError: the arrays do not fit together, or a user has an item twice.

    Example:
      >>> from bilevax.applications.ranking import Ratings
      >>> ratings = Ratings(offsets=[0, 2, 3], items=[4, 1, 0], values=[5.0, 3.0, 4.0], item_count=6)
      >>> ratings.users, ratings.pairs, ratings.items.tolist()
      (2, 3, [1, 4, 0])
    """

    offsets: Array
    items: Array
    values: Array
    users: int = eqx.field(static=True)
    item_count: int = eqx.field(static=True)
    longest: int = eqx.field(static=True)

    def __init__(self, offsets: Any, items: Any, values: Any, item_count: int, *, empty_users: bool = False):
        column, value = np.asarray(items), np.asarray(values, np.float32)
        item_count = bx.checks.whole_number("item_count", item_count, 1, _MOST)
        if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
            raise ValueError(
                f"items must be a vector of integers, got shape {column.shape} of {column.dtype}"
            )
        bounds = _checked_offsets(np.asarray(offsets), len(column), empty_users)
        if value.shape != column.shape:
            raise ValueError(f"values must have one entry per item {column.shape}, got shape {value.shape}")
        if column.size and (column.min() < 0 or column.max() >= item_count):
            raise ValueError(
                f"items must lie in 0..{item_count - 1}, got {column.min()} to {column.max()}: renumber them"
            )
        if not (np.isfinite(value) & (value >= 0) & (value <= _LARGEST)).all():
            raise ValueError(
                f"values must lie in 0..{_LARGEST}, since the gain of a rating r is 2^r − 1, got "
                f"{value.min()} to {value.max()}: rescale them"
            )
        column = column.astype(np.int64)
        rows = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        order = np.argsort(rows * np.int64(item_count) + column)
        column, value = column[order], value[order]
        twice = (column[1:] == column[:-1]) & (rows[1:] == rows[:-1])
        if twice.any():
            place = int(np.argmax(twice))
            raise ValueError(
                f"a user may have an item only once, got item {column[place]} twice for user {rows[place]}"
            )
        self.users, self.item_count = len(bounds) - 1, item_count
        self.longest = int(np.diff(bounds).max())
        self.offsets = jnp.asarray(bounds, jnp.int32)
        self.items = jnp.asarray(column, jnp.int32)
        self.values = jnp.asarray(value)

    @staticmethod
    def of(rows: Any, *, empty_users: bool = False) -> Ratings:
        """Ratings from `bilevax.data.UserRows`, such as a part of a split."""
        return Ratings(rows.offsets, rows.item, rows.rating, rows.items, empty_users=empty_users)

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return self.items.shape[0]

    def owners(self) -> np.ndarray:
        """The user of every pair."""
        bounds = np.asarray(self.offsets)
        return np.repeat(np.arange(self.users, dtype=np.int32), np.diff(bounds))

    def ideal(self, cutoff: int | None) -> np.ndarray:
        """The DCG of every user's perfect ranking, cut at `cutoff`; 1 for users without gains."""
        owners, gains = self.owners(), np.asarray(gain(np.asarray(self.values, np.float64)))
        order = np.lexsort((-gains, owners))
        place = np.arange(self.pairs) - np.asarray(self.offsets)[owners]
        kept = place < (self.pairs if cutoff is None else cutoff)
        terms = np.where(kept, gains[order] / np.log2(place + 2.0), 0.0)
        total = np.bincount(owners, weights=terms, minlength=self.users)
        return np.where(total > 0, total, 1.0).astype(np.float32)

    def total_gain(self) -> np.ndarray:
        """The sum of every user's gains; 1 for users without gains."""
        gains = np.asarray(gain(np.asarray(self.values, np.float64)))
        total = np.bincount(self.owners(), weights=gains, minlength=self.users)
        return np.where(total > 0, total, 1.0).astype(np.float32)


def gain(rating: Any) -> Any:
    """2^r − 1, the worth of an item with rating r at the top of a list."""
    return 2.0**rating - 1


def for_all_users(constants: PyTree, users: int) -> PyTree:
    """The same constants for every user: each gets a leading axis of length `users`."""
    return jax.tree.map(lambda one: jnp.broadcast_to(jnp.asarray(one, jnp.float32), (users,)), constants)


def _checked_offsets(bounds: np.ndarray, pairs: int, empty_users: bool) -> np.ndarray:
    """The offsets as int64: differences of unsigned integers would wrap around."""
    if bounds.ndim != 1 or bounds.size < 2 or not np.issubdtype(bounds.dtype, np.integer):
        raise ValueError(
            f"offsets must be a vector of at least two integers, got shape {bounds.shape} of {bounds.dtype}"
        )
    if bounds[0] != 0 or bounds[-1] != pairs or pairs >= _MOST:
        raise ValueError(
            f"offsets must run from 0 to the number of pairs {pairs}, which must be less than {_MOST}, got "
            f"{bounds[0]} to {bounds[-1]}"
        )
    descends = (bounds[1:] < bounds[:-1]).any()
    bounds = bounds.astype(np.int64)
    lengths = np.diff(bounds)
    if descends:
        raise ValueError("offsets must ascend, got a user with a negative number of pairs")
    if pairs == 0:
        raise ValueError("ratings must hold at least one pair, got none")
    if not empty_users and (lengths == 0).any():
        empty = int(np.argmax(lengths == 0))
        raise ValueError(f"every user needs at least one training pair, got none for user {empty}")
    return bounds
