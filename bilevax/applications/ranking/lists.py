"""A user's list in one step: some of its items, some items it has not rated, and what they stand for."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

import bilevax as bx
from bilevax.applications.ranking.ratings import Ratings

_POSITIVES, _NEGATIVES, _NOISE = range(3)


class List(eqx.Module):
    """Items of one user: first P places for positives (pairs of the user), then B negatives.

    Attributes:
      user: the user.
      items: P + B items.
      rating: the ratings of the P positives.
      slot: the index of each positive among all pairs.
      real: which of the P places hold a pair. A user with fewer than P pairs has all of them in the list; the
        other places are padding, with the slot after the last pair.
      owned: the number of the user's pairs.
      noise: a random stream for the model (dropout).
    """

    user: Array
    items: Array
    rating: Array
    slot: Array
    real: Array
    owned: Array
    noise: bx.Stream

    @property
    def places(self) -> int:
        """P."""
        return self.rating.shape[0]


class Lists(bx.Rows):
    """Draws lists on the device: P distinct pairs of a user, and B random items that it has not rated.

    The pairs of a step are distinct, because its users are distinct and the pairs of a user are drawn without
    replacement (Floyd's algorithm). Negatives are drawn with replacement: the r-th item that a user has not
    rated is r + k, where k of the user's own items precede it; bisection in the user's sorted row finds k. No
    draw is ever rejected.

    Args:
      ratings: the training pairs.
      positives: P ≥ 2. The number of negatives is the run's `batch_size`.

    Example:
      >>> import jax, jax.numpy as jnp, bilevax as bx
      >>> from bilevax.applications.ranking import Lists, Ratings
      >>> ratings = Ratings([0, 2, 4], [1, 4, 0, 2], [5.0, 3.0, 4.0, 4.0], item_count=6)
      >>> batch = Lists(ratings, positives=2).draw(bx.Stream.start(jax.random.key(0)), jnp.array([1]), 3)
      >>> sorted(batch.rows.items[0, :2].tolist())
      [0, 2]
      >>> bool(jnp.isin(batch.rows.items[0, 2:], jnp.array([0, 2])).any())
      False
    """

    ratings: Ratings
    positives: int = eqx.field(static=True)

    def __init__(self, ratings: Ratings, positives: int = 10):
        if not isinstance(ratings, Ratings):
            raise TypeError(f"ratings must be Ratings(…), got {type(ratings).__name__}")
        self.ratings = ratings
        self.positives = bx.checks.whole_number("positives", positives, 2)

    def check(self, name: str, blocks: int) -> None:
        if self.ratings.users != blocks:
            raise ValueError(f"{name} has the lists of {self.ratings.users} users, expected {blocks} blocks")

    def draw(self, random: bx.Stream, blocks: Array, size: int | None) -> bx.Batch:
        if size is None:
            raise ValueError("batch_size must be the number of negatives per list, got None")
        ratings = self.ratings
        start = take(ratings.offsets, blocks)
        owned = take(ratings.offsets, blocks + 1) - start
        place, real = sample_distinct(random.at(_POSITIVES), owned, self.positives)
        pair = start[:, None] + place
        negative = sample_unrated(random.at(_NEGATIVES), ratings, start, owned, size)
        words = random.at(_NOISE).bits((2, blocks.shape[0]))
        return bx.Batch(
            List(
                user=blocks,
                items=jnp.concatenate([take(ratings.items, pair), negative], axis=1),
                rating=take(ratings.values, pair),
                slot=jnp.where(real, pair, ratings.pairs),
                real=real,
                owned=owned,
                noise=bx.Stream(words[0], words[1]),
            )
        )


def sample_distinct(random: bx.Stream, lengths: Array, count: int) -> tuple[Array, Array]:
    """`count` distinct places below each length, and which of them are real; all sets are equally likely.

    A length n below `count` yields all its n places; the rest is padding at place 0.

    Floyd's algorithm: for j = n − p … n − 1 take a random place up to j, or j itself if that place is taken.
    It is taken if it was drawn before, or if it is a j that was taken in its own turn, which was before: so
    whether a turn finds its place taken is that of an earlier turn, whose answer is that of a still earlier
    one. Chains of turns are followed for all turns at once, twice as far each time; the turns one by one
    would be a long program.
    """
    size, turn = jnp.minimum(lengths, count), jnp.arange(count)[:, None]
    first = lengths - size
    last = first + turn
    words = random.bits((count, lengths.shape[0]))
    drawn = (words % jnp.maximum(last + 1, 1).astype(jnp.uint32)).astype(jnp.int32)
    before = (turn > turn.T)[..., None]  # of two turns, the second is the earlier one
    taken = (before & (drawn[:, None] == drawn)).any(1)
    earlier = jnp.where((drawn >= first) & (drawn < last), drawn - first, -1)
    for _ in range((count - 1).bit_length()):
        follows = earlier[:, None] == turn
        taken = taken | (follows & taken).any(1)
        earlier = jnp.where(follows, earlier, -1).max(1)
    places = jnp.where(taken, last, drawn).T
    real = jnp.arange(count) < size[:, None]
    return jnp.where(real, places, 0), real


def sample_unrated(random: bx.Stream, ratings: Ratings, start: Array, owned: Array, count: int) -> Array:
    """`count` items that each user has not rated, uniform, with replacement.

    A user who has rated every item gets arbitrary items: their weight in a list is zero.
    """
    free = jnp.maximum(ratings.item_count - owned, 1)[:, None]
    rank = random.integers((start.shape[0], count), free)
    turns = max(1, ratings.longest.bit_length())

    # The number k of the user's items that precede the rank-th unrated one: the first k with
    # items[k] − k > rank, as items[k] − k counts the unrated items below items[k].
    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        item = take(ratings.items, jnp.minimum(start[:, None] + middle, ratings.pairs - 1))
        above = item - middle > rank
        going = low < high
        return jnp.where(going & ~above, middle + 1, low), jnp.where(going & above, middle, high)

    low = jnp.zeros_like(rank)
    high = jnp.broadcast_to(owned[:, None], rank.shape)
    for turn in range(turns):
        low, high = halve(turn, (low, high))
    return jnp.minimum(rank + low, ratings.item_count - 1)


def stratum_weights(batch: List, item_count: int | Array) -> tuple[Array, Array]:
    """How many items of the catalogue one positive and one negative of a list stand for."""
    drawn = jnp.sum(batch.real)
    negatives = batch.items.shape[0] - batch.places
    return batch.owned / drawn, (item_count - batch.owned) / negatives


def item_weights(batch: List, item_count: int | Array) -> Array:
    """How many items of the catalogue each place of a list stands for: zero for padding."""
    positive, negative = stratum_weights(batch, item_count)
    negatives = jnp.broadcast_to(negative, (batch.items.shape[0] - batch.places,))
    return jnp.concatenate([jnp.where(batch.real, positive, 0), negatives])


def top_threshold(scores: Array, batch: List, cutoff: Array, item_count: int | Array) -> Array:
    """The score above which `cutoff` items of the catalogue lie, estimated from a list."""
    order = jnp.argsort(-scores)
    above = jnp.cumsum(item_weights(batch, item_count)[order])
    return scores[order][jnp.minimum(jnp.searchsorted(above, cutoff), scores.shape[0] - 1)]


def take(array: Array, index: Array) -> Array:
    """The entries of an array at indices that are known to be valid."""
    return array.at[index].get(mode="promise_in_bounds")


def full_list(ratings: Ratings, user: int) -> List:
    """A list of all items, each once: the user's pairs, then every item that it has not rated."""
    start, stop = int(ratings.offsets[user]), int(ratings.offsets[user + 1])
    own = ratings.items[start:stop]
    rest = jnp.setdiff1d(jnp.arange(ratings.item_count, dtype=jnp.int32), own)
    zero = jnp.zeros((), jnp.uint32)
    return List(
        user=jnp.asarray(user, jnp.int32),
        items=jnp.concatenate([own, rest]),
        rating=ratings.values[start:stop],
        slot=jnp.arange(start, stop, dtype=jnp.int32),
        real=jnp.ones(stop - start, bool),
        owned=jnp.asarray(stop - start, jnp.int32),
        noise=bx.Stream(zero, zero),
    )
