"""Interactions by user, in flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bilevax.data.errors import DataError


@dataclass(frozen=True, eq=False, repr=False)
class UserRows:
    """Interactions by user, in order of time: user u has the entries offsets[u] to offsets[u + 1].

    Attributes:
      offsets: users + 1 ascending numbers from 0, int32.
      item: codes of items, int32.
      rating: float32.
      time: int64.
      items: the number of items in the whole catalogue.

    Raises:
      DataError: the offsets do not ascend from 0 to the number of entries, the columns differ in length, an
        item is not in the catalogue, or there are 2³¹ entries or more.

    Example:
      >>> from bilevax.data import make_interactions
      >>> rows = make_interactions([7, 8, 7], [1, 1, 2], time=[30, 10, 20]).csr()
      >>> rows.offsets.tolist(), rows.item.tolist(), rows.user.tolist()
      ([0, 2, 3], [1, 0, 0], [0, 0, 1])
    """

    offsets: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    items: int

    def __post_init__(self) -> None:
        entries = len(self.item)
        if entries >= 2**31 or self.items > 2**31:
            raise DataError(f"{entries:,} interactions of {self.items:,} items do not fit into 32 bits")
        offsets = np.asarray(self.offsets)
        # Compared, and not subtracted: a difference of unsigned numbers is never negative.
        ascending = offsets.ndim == 1 and offsets.dtype.kind in "iu" and np.all(offsets[:-1] <= offsets[1:])
        if not (ascending and len(offsets) and offsets[0] == 0 and offsets[-1] == entries):
            raise DataError(f"needs offsets that ascend from 0 to the {entries:,} entries")
        if self.item.dtype.kind not in "iu" or not len(self.rating) == len(self.time) == entries:
            raise DataError(f"needs {entries:,} codes of items, ratings and times")
        low, high = (int(self.item.min()), int(self.item.max())) if entries else (0, -1)
        if low < 0 or high >= self.items:
            raise DataError(f"needs codes of items from 0 to {self.items - 1:,}, got {low:,} to {high:,}")
        object.__setattr__(self, "offsets", offsets.astype(np.int32))
        object.__setattr__(self, "item", self.item.astype(np.int32, copy=False))

    def __len__(self) -> int:
        return len(self.item)

    def __repr__(self) -> str:
        return f"UserRows({len(self):,} ratings of {self.items:,} items by {self.users:,} users)"

    @property
    def users(self) -> int:
        """The number of users, including those without entries."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """How many entries each user has."""
        return np.diff(self.offsets)

    @cached_property
    def user(self) -> np.ndarray:
        """The user of each entry, int32."""
        return np.repeat(np.arange(self.users, dtype=np.int32), self.counts)

    def where(self, keep: np.ndarray) -> UserRows:
        """Only the entries where a mask is True; users without entries stay."""
        before = np.concatenate([[0], np.cumsum(keep)])
        return UserRows(before[self.offsets], self.item[keep], self.rating[keep], self.time[keep], self.items)
