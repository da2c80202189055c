"""Splits of interactions into train, dev and test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bilevax.data.arguments import generator, number, whole_number
from bilevax.data.errors import DataError
from bilevax.data.interactions import Interactions
from bilevax.data.user_rows import UserRows


@dataclass(frozen=True, eq=False)
class Splits:
    """Three disjoint parts of a table; users and items have the same codes in all of them.

    Attributes:
      train: to train on.
      dev: to choose settings with.
      test: to report results on.
    """

    train: UserRows
    dev: UserRows
    test: UserRows


def split_last(
    table: Interactions, k_dev: int = 5, k_test: int = 5, *, short: Literal["error", "train"] = "error"
) -> Splits:
    """Leave out the last interactions of every user: the very last for test, those before them for dev.

    Args:
      table: the interactions.
      k_dev: how many of each user's interactions go to dev.
      k_test: how many go to test.
      short: what to do with users who have fewer than k_dev + k_test + 1: "error", or leave all their
        interactions in "train". `table.at_least(k_dev + k_test + 1)` drops these users.

    Raises:
      DataError: some users have too few interactions, or, with "train", all of them.

    Example:
      >>> from bilevax.data import make_interactions, split_last
      >>> table = make_interactions([0, 0, 0, 0], [4, 5, 6, 7], time=[3, 1, 2, 0])
      >>> parts = split_last(table, k_dev=1, k_test=1)
      >>> table.item_ids[parts.train.item].tolist(), table.item_ids[parts.test.item].tolist()
      ([7, 5], [4])
    """
    k_dev, k_test = whole_number("k_dev", k_dev, 0), whole_number("k_test", k_test, 0)
    if short not in ("error", "train"):
        raise ValueError(f"short must be 'error' or 'train', got {short!r}")
    rows = table.csr()
    is_short = rows.counts < k_dev + k_test + 1
    if is_short.all() or (short == "error" and is_short.any()):
        raise DataError(_too_short(table, is_short, k_dev + k_test + 1))
    from_end = np.where(is_short, len(rows) + 1, 0)[rows.user] + _left(rows)
    in_test = from_end < k_test
    in_dev = (from_end < k_dev + k_test) & ~in_test
    return Splits(rows.where(~in_test & ~in_dev), rows.where(in_dev), rows.where(in_test))


def split_ratio(
    table: Interactions, dev: float = 0.1, test: float = 0.1, *, seed: int | None = None
) -> Splits:
    """Leave out a fraction of every user's interactions: the last ones, or with a seed random ones.

    Of n interactions, test · n and dev · n are left out, both rounded down. A user with few interactions may
    have none in dev or test, but always has one in train.

    Args:
      table: the interactions.
      dev: fraction for dev.
      test: fraction for test; dev + test is less than 1.
      seed: None for the last in time, a whole number for a random choice.

    Raises:
      DataError: dev or test would be empty although its fraction is not 0.

    Example:
      >>> from bilevax.data import make_interactions, split_ratio
      >>> table = make_interactions([0] * 10, range(10), time=range(10))
      >>> parts = split_ratio(table, dev=0.2, test=0.2)
      >>> parts.train.item.tolist(), parts.dev.item.tolist(), parts.test.item.tolist()
      ([0, 1, 2, 3, 4, 5], [6, 7], [8, 9])
    """
    dev, test = number("dev", dev, 0, 1), number("test", test, 0, 1)
    if dev + test >= 1:
        raise ValueError(f"dev + test must be below 1, got {dev} + {test}")
    rows = table.csr()
    from_end = _left(rows)
    if seed is not None:
        order = np.lexsort((generator(seed).random(len(rows)), rows.user))
        from_end[order] = _left(rows)
    tests = np.floor(rows.counts * test + 1e-9)[rows.user]
    devs = np.floor(rows.counts * dev + 1e-9)[rows.user]
    in_test = from_end < tests
    in_dev = (from_end < tests + devs) & ~in_test
    for name, fraction, mask in (("dev", dev, in_dev), ("test", test, in_test)):
        if fraction > 0 and not mask.any():
            raise DataError(f"no user has enough interactions for a {name} part of {fraction:g}")
    return Splits(rows.where(~in_test & ~in_dev), rows.where(in_dev), rows.where(in_test))


def split_time(
    table: Interactions, dev_from: int, test_from: int, *, cold: Literal["drop", "keep"] = "drop"
) -> Splits:
    """Split by time: train is before `dev_from`, test starts at `test_from`, and dev is between them.

    Args:
      table: the interactions.
      dev_from: when dev starts.
      test_from: when test starts.
      cold: "drop" or "keep" the dev and test entries of users who have none in train.

    Raises:
      DataError: a part would be empty.

    Example:
      >>> from bilevax.data import make_interactions, split_time
      >>> parts = split_time(make_interactions([0] * 4, range(4), time=range(4)), dev_from=2, test_from=3)
      >>> parts.train.item.tolist(), parts.dev.item.tolist(), parts.test.item.tolist()
      ([0, 1], [2], [3])
    """
    for name, moment in (("dev_from", dev_from), ("test_from", test_from)):
        number(name, moment, -np.inf, np.inf)
    if not dev_from < test_from:
        raise ValueError(f"dev_from must be before test_from, got {dev_from} and {test_from}")
    if cold not in ("drop", "keep"):
        raise ValueError(f"cold must be 'drop' or 'keep', got {cold!r}")
    rows = table.csr()
    train = rows.where(rows.time < dev_from)
    known = (train.counts > 0)[rows.user] if cold == "drop" else np.ones(len(rows), bool)
    dev = rows.where(known & (rows.time >= dev_from) & (rows.time < test_from))
    test = rows.where(known & (rows.time >= test_from))
    for name, part in (("train", train), ("dev", dev), ("test", test)):
        if len(part) == 0:
            span = f"{int(rows.time.min())} to {int(rows.time.max())}"
            raise DataError(f"the {name} part would be empty; the interactions are from {span}")
    return Splits(train, dev, test)


def _left(rows: UserRows) -> np.ndarray:
    """How many entries of the same user follow each entry."""
    return rows.offsets[1:][rows.user] - 1 - np.arange(len(rows))


def _too_short(table: Interactions, is_short: np.ndarray, needed: int) -> str:
    ids = table.user_ids[is_short]
    named = ", ".join(str(one) for one in ids[:5]) + (", …" if len(ids) > 5 else "")
    return (
        f"{len(ids):,} of {table.users:,} users have fewer than the {needed} interactions that the split "
        f"needs: {named}; drop them with .at_least({needed}), or leave them in train with short='train'"
    )
