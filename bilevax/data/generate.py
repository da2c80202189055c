"""Generated interactions: any shape, popular and rare items, busy and idle users, and a known truth.

Item j is chosen by user u with a probability that is proportional to

    w_uj = p_j · sigmoid(s · ⟨a_u, b_j⟩),      p_j ∝ (j + q)^(-skew) in a random order of the items,

one item after the other and none twice; a_u and b_j are random vectors of length `rank`. Before that, every
item is given to one user, so that the catalogue is as large as it should be. A rating is the sum of
⟨a_u, b_j⟩, how kind the user is, how good the item is and noise, scaled and rounded to the nearest grade.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bilevax.data.drawing import Draw, taste
from bilevax.data.interactions import Interactions

_BLOCK = 1 << 21  # ratings that are drawn together: it bounds the memory
_START, _SPAN = 1_000_000_000, 10 * 365 * 86_400  # seconds: the first moment, and all there are


class Shape(NamedTuple):
    """Numbers of a data set, its grades (the least, the largest, the step between them) and its skew."""

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
      table: the interactions, one user after the other.
      user_factors: a_u, (users, rank).
      item_factors: b_j, (items, rank).
      popularity: p_j, (items,), with sum 1.
    """

    table: Interactions
    user_factors: np.ndarray
    item_factors: np.ndarray
    popularity: np.ndarray

    def weights(self, user: int) -> np.ndarray:
        """w_uj for all items j of a user u, with sum 1: the truth that a model may hope to find."""
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
    """Interactions of a given shape, with popular and rare items, busy and idle users, and a latent truth.

    Args:
      users: how many, or the name of a shape: "like-ml-1m", "like-ml-20m", "like-netflix".
      items: how many; every one of them is rated.
      ratings: how many; every user has some, no pair of user and item occurs twice.
      seed: the same seed gives the same interactions.
      skew: how much more popular the popular items are: 0 is not at all. Left out, it is 1, or what makes
        a named shape look like its model.
      rank: length of the vectors that decide who likes what.
      grades: the least rating, the largest and the step between them; 1 to 5 by 1 if left out.

    Returns:
      The interactions and the truth.

    Raises:
      ValueError: numbers that do not go together.

    Example:
      >>> from bilevax.data.generate import interactions
      >>> made = interactions(50, 40, 600, seed=0)
      >>> made.table, made.table.csr().counts.min() > 0
      (Interactions(600 ratings of 40 items by 50 users), np.True_)
    """
    shape = _shape(users, items, ratings, grades)
    skew = shape.skew if skew is None else skew
    if not np.isfinite(skew) or skew < 0:
        raise ValueError(f"skew must be a number from 0, got {skew!r}")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a positive whole number, got {rank!r}")
    random = np.random.default_rng(seed)
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
        return SHAPES[users] if grades is None else SHAPES[users]._replace(grades=grades)
    for name, count in (("users", users), ("items", items), ("ratings", ratings)):
        if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} must be a positive whole number, got {count!r}")
    shape = Shape(int(users), int(items or 0), int(ratings or 0))
    if not max(shape.users, shape.items) <= shape.ratings <= shape.users * shape.items:
        raise ValueError(
            f"ratings must be at least users and items, and at most users · items, got {shape.ratings} "
            f"with {shape.users} and {shape.items}"
        )
    if grades is None:
        return shape
    if not (len(grades) == 3 and np.isfinite(grades).all() and grades[0] < grades[1] and grades[2] > 0):
        raise ValueError(f"grades must be the least, the largest and a positive step, got {grades!r}")
    return shape._replace(grades=grades)


def _activity(random: np.random.Generator, shape: Shape) -> np.ndarray:
    """How many ratings each user gives: at least one, log-normal above, with the exact sum."""
    least = min(20, shape.ratings // shape.users // 2) or 1
    wish = random.lognormal(0.0, 1.2, shape.users)
    # Nobody has rated more than half of the catalogue, unless there is no other way.
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
    """One pair for every item, whose users are drawn from the places that they have to fill."""
    return owner[random.choice(len(owner), items, replace=False)] * np.int64(items) + np.arange(items)


def _blocks(counts: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of users with some two million ratings each."""
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
    """Moments: users come at some time, and most of what they do follows soon."""
    start = random.random(users, np.float32) * 0.8
    after = random.standard_exponential(len(user), np.float32) * 0.02
    return (np.minimum(start[user] + after, 1.0) * np.float64(_SPAN)).astype(np.int64) + _START
