"""The simplest recommender: the most popular items, the same for every user."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from bilevax.applications.ranking.lists import take
from bilevax.applications.ranking.ratings import Ratings


@dataclasses.dataclass(frozen=True)
class Popularity:
    """Scores an item by the number of users who have it in the training data.

    Example:
      >>> import jax.numpy as jnp
      >>> from bilevax.applications.ranking import Popularity, Ratings
      >>> ratings = Ratings([0, 2, 3], [1, 2, 2], [5.0, 3.0, 4.0], item_count=4)
      >>> Popularity().score(Popularity().count(ratings), 0, jnp.arange(4)).tolist()
      [0.0, 1.0, 2.0, 0.0]
    """

    def count(self, ratings: Ratings) -> Array:
        """The parameters x: the number of training pairs of every item."""
        return jnp.zeros(ratings.item_count).at[ratings.items].add(1.0)

    def score(self, x: Array, user: Any, items: Array) -> Array:
        return take(x, items)
