"""Items drawn for many users at once, without replacement, by popularity and taste."""

from __future__ import annotations

import numpy as np

_SHARE = 0.05  # of the catalogue: for users who rate more of it, all items are weighed instead of drawn
_ROUNDS = 5  # of drawing; for users who still lack items then, all items are weighed
_SHARPNESS = 2.0  # s: how much taste decides what is chosen


def taste(liking: np.ndarray) -> np.ndarray:
    """sigmoid(s · ⟨a_u, b_j⟩): the probability that a user accepts a drawn item."""
    return 1 / (1 + np.exp(-_SHARPNESS * liking))


class Draw:
    """Draws items for users; the pair of user u and item j is stored as the number u · items + j."""

    def __init__(
        self,
        random: np.random.Generator,
        user_factors: np.ndarray,
        item_factors: np.ndarray,
        popularity: np.ndarray,
    ):
        self.random, self.user_factors, self.item_factors = random, user_factors, item_factors
        self.items = len(item_factors)
        self.popularity = popularity.astype(np.float32)
        self.table = _alias_table(popularity)

    def block(self, first: int, last: int, counts: np.ndarray, given: np.ndarray) -> np.ndarray:
        """The pairs of the users from `first` up to `last`, ascending; they include the given pairs."""
        low, high = np.searchsorted(given, [first * self.items, last * self.items])
        pairs = given[low:high]
        left = counts - np.bincount(pairs // self.items - first, minlength=last - first)
        busy = counts > _SHARE * self.items
        for _ in range(_ROUNDS):
            open_users = np.flatnonzero((left > 0) & ~busy)
            if len(open_users) == 0:
                break
            pairs, left = self._round(first, open_users, left, pairs)
        return np.sort(np.concatenate([pairs, self._exact(first, left, pairs)]))

    def _round(
        self, first: int, open_users: np.ndarray, left: np.ndarray, pairs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw by popularity, accept by taste, drop items that a user has, and keep as many as are needed.

        Drawing until a new item comes means choosing among the other items in proportion to w_uj.
        """
        draws = np.repeat(open_users, (2.5 * left[open_users]).astype(np.int64) + 4)
        item = self._by_popularity(len(draws))
        user = draws + first
        score = np.einsum("ij,ij->i", self.user_factors[user], self.item_factors[item])
        accepted = self.random.random(len(draws), np.float32) < taste(score)
        fresh = (user * self.items + item)[accepted]
        fresh = fresh[~_among(fresh, self._of(open_users, first, pairs))]
        by_pair = np.argsort(fresh, kind="stable")
        again = np.zeros(len(fresh), bool)
        again[by_pair[1:]] = fresh[by_pair[1:]] == fresh[by_pair[:-1]]
        fresh = fresh[~again]
        # `fresh` is in the order of the draws, that is, by user.
        owner = fresh // self.items - first
        number = np.bincount(owner, minlength=len(left))
        rank = np.arange(len(fresh)) - (np.cumsum(number) - number)[owner]
        kept = fresh[rank < left[owner]]
        return np.concatenate([pairs, kept]), left - np.minimum(number, left)

    def _exact(self, first: int, left: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """The same choice for users who take much of the catalogue, by weighing all items.

        If item j arrives after an exponential time with rate w_uj, then the first items to arrive are a
        sample without replacement in proportion to w_uj.
        """
        made = [np.empty(0, np.int64)]
        open_users = np.flatnonzero(left > 0)
        ordered = self._of(open_users, first, pairs)
        for user in open_users:
            rate = self.popularity * taste(self.item_factors @ self.user_factors[first + user])
            arrival = self.random.standard_exponential(self.items, np.float32) / rate
            start = (first + user) * self.items
            low, high = np.searchsorted(ordered, [start, start + self.items])
            arrival[ordered[low:high] - start] = np.inf
            last = np.partition(arrival, left[user] - 1)[left[user] - 1]
            made.append(start + np.flatnonzero(arrival <= last)[: left[user]])
        return np.concatenate(made)

    def _of(self, users: np.ndarray, first: int, pairs: np.ndarray) -> np.ndarray:
        """The pairs of some users, ascending."""
        wanted = np.zeros(len(self.user_factors) - first, bool)
        wanted[users] = True
        return np.sort(pairs[wanted[pairs // self.items - first]])

    def _by_popularity(self, count: int) -> np.ndarray:
        keep, other = self.table
        item = self.random.integers(self.items, size=count, dtype=np.int32)
        kept = self.random.random(count, np.float32) < keep[item]
        return np.where(kept, item, other[item]).astype(np.int64)


def _among(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Which values are in an ascending vector."""
    if len(ordered) == 0:
        return np.zeros(len(values), bool)
    place = np.searchsorted(ordered, values)
    return ordered[np.minimum(place, len(ordered) - 1)] == values


def _alias_table(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's alias tables: a draw in proportion to the weights takes two random numbers."""
    count = len(weights)
    scaled = (weights * count).tolist()
    keep, other = np.ones(count, np.float32), np.arange(count, dtype=np.int32)
    small = [i for i, weight in enumerate(scaled) if weight < 1]
    large = [i for i, weight in enumerate(scaled) if weight >= 1]
    while small and large:
        i, j = small.pop(), large.pop()
        keep[i], other[i] = scaled[i], j
        scaled[j] -= 1 - scaled[i]
        (small if scaled[j] < 1 else large).append(j)
    return keep, other
