"""Interactions divided into three: to learn from, to choose by, to report on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bilevax.data.errors import DataError
from bilevax.data.interactions import Interactions
from bilevax.data.user_rows import UserRows


@dataclass(frozen=True, eq=False)
class Splits:
    """Three parts without a common entry; all have the same users and items, in the same codes.

    Attributes:
      train: what to learn from.
      dev: what to choose settings by.
      test: what to report.
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
      k_dev: how many of each user's go to dev.
      k_test: how many go to test.
      short: what to do with users who have less than k_dev + k_test + 1: "error", or leave all of theirs in
        "train" (they have no entries in dev and test then). `table.at_least(k_dev + k_test + 1)` drops them.

    Raises:
      DataError: users are too short, or nobody is long enough.

    Example:
      >>> from bilevax.data import make_interactions, split_last
      >>> table = make_interactions([0, 0, 0, 0], [4, 5, 6, 7], time=[3, 1, 2, 0])
      >>> parts = split_last(table, k_dev=1, k_test=1)
      >>> table.item_ids[parts.train.item].tolist(), table.item_ids[parts.test.item].tolist()
      ([7, 5], [4])
    """
    for name, count in (("k_dev", k_dev), ("k_test", k_test)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"{name} must be a whole number from 0, got {count!r}")
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
    """Leave out a fraction of every user's interactions: the last of them, or any with a seed.

    Of n interactions, test · n and dev · n, both rounded down, are left out: a user with few of them may have
    none in dev or test, and always has one in train.

    Args:
      table: the interactions.
      dev: fraction for dev.
      test: fraction for test; dev + test is less than 1.
      seed: None for the last in time, a whole number for a random choice.

    Raises:
      DataError: dev or test would be empty although a fraction of it was asked for.

    Example:
      >>> from bilevax.data import make_interactions, split_ratio
      >>> table = make_interactions([0] * 10, range(10), time=range(10))
      >>> parts = split_ratio(table, dev=0.2, test=0.2)
      >>> parts.train.item.tolist(), parts.dev.item.tolist(), parts.test.item.tolist()
      ([0, 1, 2, 3, 4, 5], [6, 7], [8, 9])
    """
    for name, fraction in (("dev", dev), ("test", test)):
        if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise ValueError(f"{name} must be a fraction from 0 to below 1, got {fraction!r}")
    if dev + test >= 1:
        raise ValueError(f"dev + test must be below 1, got {dev} + {test}")
    rows = table.csr()
    from_end = _left(rows)
    if seed is not None:
        order = np.lexsort((np.random.default_rng(seed).random(len(rows)), rows.user))
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
    """Divide at two moments: train is before `dev_from`, dev from then on, test from `test_from` on.

    Args:
      table: the interactions.
      dev_from: first moment of dev.
      test_from: first moment of test.
      cold: what to do with the dev and test entries of users who have none in train: "drop" or "keep" them.

    Raises:
      DataError: one of the parts would be empty.

    Example:
      >>> from bilevax.data import make_interactions, split_time
      >>> parts = split_time(make_interactions([0] * 4, range(4), time=range(4)), dev_from=2, test_from=3)
      >>> parts.train.item.tolist(), parts.dev.item.tolist(), parts.test.item.tolist()
      ([0, 1], [2], [3])
    """
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
    """How many entries of the same user come after each."""
    return rows.offsets[1:][rows.user] - 1 - np.arange(len(rows))


def _too_short(table: Interactions, is_short: np.ndarray, needed: int) -> str:
    ids = table.user_ids[is_short]
    named = ", ".join(str(one) for one in ids[:5]) + (", …" if len(ids) > 5 else "")
    return (
        f"{len(ids):,} of {table.users:,} users have less than the {needed} interactions that the split "
        f"needs: {named}; drop them with .at_least({needed}), or leave them in train with short='train'"
    )
