"""A table of ratings, split by user and on the device, with its held-out parts as `evaluate` takes them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from bilevax.applications.ranking import Held, Ratings, hold_out
from bilevax.data import DataError, load_interactions, split_last


@dataclasses.dataclass(frozen=True)
class Parts:
    """A split on the device, and its held-out parts in the form that `evaluate` takes."""

    train: Ratings
    dev: Ratings
    test: Ratings
    held_dev: Held
    held_test: Held


def load_parts(
    name: str,
    models: int = 1,
    users: int | None = None,
    *,
    held: int = 5,
    gap: int = 0,
    sampled: int | None = None,
) -> Parts:
    """Splits a data set: the last ratings of every user for testing, those before for development.

    Args:
      name: a data set of `bilevax.data.load_interactions`.
      models: number of models that are evaluated side by side.
      users: number of users to use, from the first, with the items that they have rated; None uses all.
      held: number of ratings of every user for testing, and for development.
      gap: number of ratings of every user, just before the development ratings, to leave out of `train`; they
        are not ranked either. With a gap of 5 the development data are as far from the training data as the
        test data are.
      sampled: rank development items among this many random items that the user has rated in no part; None
        ranks them among all items that are not in `train`. Test items are always ranked among all.

    Raises:
      DataError: if no user has enough ratings.
    """
    table = load_interactions(name)
    if users is not None:
        few = np.flatnonzero(table.user < users)
        columns = {field: getattr(table, field)[few] for field in ("user", "item", "rating", "time")}
        table = dataclasses.replace(table, **columns, user_ids=table.user_ids[:users])
    least = 2 * held + 1 + gap
    if gap and table.csr().counts.max() < least:
        raise DataError(f"a gap of {gap} needs users with {least} ratings, got none: try a smaller gap")
    table = table.at_least(least)
    split = split_last(table, held, held)
    seen, dev, test = (Ratings.of(part) for part in (split.train, split.dev, split.test))
    train = Ratings.of(split_last(table, gap, 2 * held).train) if gap else seen
    group = max(1, min(train.users, group_scores() // (train.item_count * models)))
    left_out = [seen] if sampled is None else [seen, test]
    held_dev = hold_out(dev, left_out, sampled=sampled, group=group)
    return Parts(train, dev, test, held_dev, hold_out(test, [seen, dev], group=group))


def group_scores() -> int:
    """How many scores to compute at once."""
    return 2**20 if jax.default_backend() == "cpu" else 2**23
