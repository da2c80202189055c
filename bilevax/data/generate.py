"""Generated interactions with a known truth: popular and rare items, active and inactive users.

User u chooses item j with a probability proportional to

    w_uj = p_j · sigmoid(s · ⟨a_u, b_j⟩),      p_j ∝ (j + q)^(-skew) in a random order of the items,

one item after the other and none twice; a_u and b_j are random vectors of length `rank`. Before that, every
item is assigned to one user, so that all items occur. A rating is ⟨a_u, b_j⟩ plus a bias of the user, a bias
of the item and noise, scaled and rounded to the nearest grade.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bilevax.data.arguments import generator, number, whole_number
from bilevax.data.drawing import Draw, taste
from bilevax.data.interactions import Interactions

_BLOCK = 1 << 21  # ratings that are drawn together: this bounds the memory
_START, _SPAN = 1_000_000_000, 10 * 365 * 86_400  # seconds: the first possible time, and the span of times
_COUNT_LIMIT = 2**31 - 1  # codes and offsets have 32 bits
_SKEW_LIMIT = 10  # beyond it, the popularity of rare items underflows in float32


class Shape(NamedTuple):
    """Counts of a data set, its grades (lowest, highest, step between them) and its skew."""

    users: int
    items: int
    ratings: int
    grades: tuple[float, float, float] = (1.0, 5.0, 1.0)
    skew: float = 1.0


SHAPES = {
    "like-ml-1m": Shape(6_040, 3_706, 1_000_209),
    "like-ml-20m": Shape(138_493, 26_744, 20_000_263, (0.5, 5.0, 0.5), skew=1.6),
    "like-netflix": Shape(236_117, 17_770, 89_973_534, skew=1.4),
}


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated interactions and the truth behind them.

    Attributes:
      table: the interactions, by user.
      user_factors: a_u, (users, rank).
      item_factors: b_j, (items, rank).
      popularity: p_j, (items,), with sum 1.
    """

    table: Interactions
    user_factors: np.ndarray
    item_factors: np.ndarray
    popularity: np.ndarray

    def weights(self, user: int) -> np.ndarray:
        """w_uj of a user u for all items j, with sum 1: the truth that a model tries to find."""
        weights = self.popularity * taste(self.item_factors @ self.user_factors[user])
        return weights / weights.sum()


def interactions(
    users: int | str,
    items: int | None = None,
    ratings: int | None = None,
    *,
    seed: int,
    skew: float | None = None,
    rank: int = 8,
    grades: tuple[float, float, float] | None = None,
) -> Generated:
    """Interactions of a given shape, drawn from the model that the module describes.

    Args:
      users: the number of users, or the name of a shape: "like-ml-1m", "like-ml-20m", "like-netflix".
      items: the number of items; every item is rated.
      ratings: the number of ratings; every user has some, and no pair of user and item occurs twice.
      seed: the same seed gives the same interactions.
      skew: how unequal the popularity of items is, from 0 (equal) to 10. By default 1, or for a named shape
        the value that makes it similar to the real data set.
      rank: the length of the vectors a_u and b_j.
      grades: the lowest rating, the highest and the step between them; by default 1 to 5 by 1.

    Returns:
      The interactions and the truth.

    Raises:
      ValueError: an argument is invalid, or the counts do not fit together.

    Example:
      >>> from bilevax.data.generate import interactions
      >>> made = interactions(50, 40, 600, seed=0)
      >>> made.table, made.table.csr().counts.min() > 0
      (Interactions(600 ratings of 40 items by 50 users), np.True_)
    """
    shape = _shape(users, items, ratings, grades)
    skew = number("skew", shape.skew if skew is None else skew, 0, _SKEW_LIMIT)
    rank = whole_number("rank", rank, 1)
    random = generator(seed)
    scale = rank**-0.25  # so that ⟨a_u, b_j⟩ has variance 1
    user_factors = scale * random.standard_normal((shape.users, rank), np.float32)
    item_factors = scale * random.standard_normal((shape.items, rank), np.float32)
    popularity = (random.permutation(shape.items) + 10.0 + 0.002 * shape.items) ** -skew
    popularity /= popularity.sum()
    counts = _activity(random, shape)
    owner = np.repeat(np.arange(shape.users), counts)
    given = np.sort(_given(random, owner, shape.items))
    del owner
    draw = Draw(random, user_factors, item_factors, popularity)
    chosen = [draw.block(first, last, counts[first:last], given) for first, last in _blocks(counts)]
    pairs = np.concatenate(chosen)
    user, item = (part.astype(np.int32) for part in np.divmod(pairs, shape.items))
    del pairs, chosen
    table = Interactions(
        user,
        item,
        _grade(random, user, item, user_factors, item_factors, shape.grades),
        _times(random, user, shape.users),
        np.arange(shape.users),
        np.arange(shape.items),
    )
    return Generated(table, user_factors, item_factors, popularity)


def _shape(
    users: int | str, items: int | None, ratings: int | None, grades: tuple[float, float, float] | None
) -> Shape:
    if isinstance(users, str):
        if users not in SHAPES:
            raise ValueError(f"users must be a number or one of {', '.join(SHAPES)}, got {users!r}")
        if items is not None or ratings is not None:
            raise ValueError(f"items and ratings must be left out with the shape {users!r}")
        shape = SHAPES[users]
    else:
        shape = Shape(
            whole_number("users", users, 1, _COUNT_LIMIT),
            whole_number("items", items, 1, _COUNT_LIMIT),
            whole_number("ratings", ratings, 1, _COUNT_LIMIT),
        )
    if not max(shape.users, shape.items) <= shape.ratings <= shape.users * shape.items:
        raise ValueError(
            f"ratings must be at least users and items, and at most users · items, got {shape.ratings} "
            f"with {shape.users} and {shape.items}"
        )
    return shape if grades is None else shape._replace(grades=_checked(grades))


def _checked(grades: tuple[float, float, float]) -> tuple[float, float, float]:
    try:
        low, high, step = (float(grade) for grade in grades)
    except (TypeError, ValueError, OverflowError):
        low = high = step = np.nan
    if not -np.inf < low < high < np.inf or not 0 < step <= high - low:
        raise ValueError(f"grades must be the lowest, the highest and a positive step, got {grades!r}")
    return low, high, step


def _activity(random: np.random.Generator, shape: Shape) -> np.ndarray:
    """The number of ratings of each user: at least one, log-normal above that, with the exact sum."""
    least = min(20, shape.ratings // shape.users // 2) or 1
    wish = random.lognormal(0.0, 1.2, shape.users)
    # No user rates more than half of the catalogue, unless the counts require it.
    most = shape.items // 2 if shape.ratings < 0.4 * shape.users * shape.items else shape.items
    counts = np.full(shape.users, least)
    left = shape.ratings - int(counts.sum())
    while left > 0:
        room = np.flatnonzero(counts < most)
        share = wish[room] * (left / wish[room].sum())
        more = np.minimum(np.floor(share).astype(np.int64), most - counts[room])
        if more.sum() == 0:
            more[np.argsort(-share)[:left]] = 1
        counts[room] += more
        left = shape.ratings - int(counts.sum())
    return counts


def _given(random: np.random.Generator, owner: np.ndarray, items: int) -> np.ndarray:
    """One pair for every item; users are drawn in proportion to their numbers of ratings."""
    return owner[random.choice(len(owner), items, replace=False)] * np.int64(items) + np.arange(items)


def _blocks(counts: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of users with about two million ratings each."""
    ends = np.cumsum(counts)
    cuts = np.searchsorted(ends, np.arange(_BLOCK, ends[-1], _BLOCK))
    edges = np.unique(np.concatenate([[0], cuts, [len(counts)]])).tolist()
    return list(pairwise(edges))


def _grade(
    random: np.random.Generator,
    user: np.ndarray,
    item: np.ndarray,
    user_factors: np.ndarray,
    item_factors: np.ndarray,
    grades: tuple[float, float, float],
) -> np.ndarray:
    low, high, step = grades
    kind = 0.4 * random.standard_normal(len(user_factors), np.float32)
    good = 0.4 * random.standard_normal(len(item_factors), np.float32)
    rating = np.empty(len(user), np.float32)
    for start in range(0, len(user), _BLOCK):
        u, j = user[start : start + _BLOCK], item[start : start + _BLOCK]
        liking = np.einsum("ij,ij->i", user_factors[u], item_factors[j])
        noise = random.standard_normal(len(u), np.float32)
        # MovieLens' ratings lie around 0.65 of their range, with a standard deviation of 0.27 of it.
        value = 0.65 + 0.27 * (0.6 * liking + kind[u] + good[j] + 0.6 * noise)
        steps = np.rint(value * (high - low) / step)
        rating[start : start + _BLOCK] = low + step * np.clip(steps, 0, np.floor((high - low) / step))
    return rating


def _times(random: np.random.Generator, user: np.ndarray, users: int) -> np.ndarray:
    """Times: every user starts at a random time, and most ratings follow soon."""
    start = random.random(users, np.float32) * 0.8
    after = random.standard_exponential(len(user), np.float32) * 0.02
    return (np.minimum(start[user] + after, 1.0) * np.float64(_SPAN)).astype(np.int64) + _START
