"""Interactions in flat arrays, one user after the other: what goes to the device once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bilevax.data.errors import DataError


@dataclass(frozen=True, eq=False, repr=False)
class UserRows:
    """Interactions by user, in order of time: user u owns the entries offsets[u] to offsets[u + 1].

    Attributes:
      offsets: users + 1 ascending numbers from 0, int32.
      item: codes of items, int32.
      rating: float32.
      time: int64.
      items: the number of items of the whole catalogue.

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
        if len(self.item) >= 2**31:
            raise DataError(f"{len(self.item):,} interactions are more than 32-bit offsets can count")
        object.__setattr__(self, "offsets", self.offsets.astype(np.int32))

    def __len__(self) -> int:
        return len(self.item)

    def __repr__(self) -> str:
        return f"UserRows({len(self):,} ratings of {self.items:,} items by {self.users:,} users)"

    @property
    def users(self) -> int:
        """The number of users, those without entries too."""
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
        """Only the entries where a mask is True; every user stays, if only with no entry."""
        before = np.concatenate([[0], np.cumsum(keep)])
        return UserRows(before[self.offsets], self.item[keep], self.rating[keep], self.time[keep], self.items)
