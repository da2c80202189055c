"""A sample of the blocks to search on, and other blocks that judge what was found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bilevax._run.descent import Exact

_CLEARLY = 2.0  # standard errors


class Division(NamedTuple):
    """Blocks to search on, and others to judge on; no others if all are searched."""

    searched: np.ndarray
    judges: np.ndarray


class Change(NamedTuple):
    """The mean of F_i over the judges at two x."""

    before: float
    after: float


def divided(count: int, size: int) -> Division:
    """So many blocks of all, and as many others, the same in every run."""
    if size >= count:
        return Division(np.arange(count), np.arange(0))
    shuffled = np.random.default_rng(0).permutation(count)
    return Division(np.sort(shuffled[:size]), np.sort(shuffled[size : 2 * size]))


def judged(judges: Exact, before: np.ndarray, after: np.ndarray) -> Change | None:
    """What F is on other blocks; None if it is not clearly less than before.

    Where some of them cannot be solved before, F is NaN there, and whatever can be solved is better.
    """
    old, new = (judges(at, judges.tracked) for at in (before, after))
    if new is None:
        return None
    if old is None:
        return Change(np.nan, new.value)
    change = new.values.astype(np.float64) - old.values
    error = change.std() / len(change) ** 0.5
    return Change(old.value, new.value) if change.mean() < -_CLEARLY * error else None
