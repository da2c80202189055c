"""The simplest recommender: what most users had."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from bilevax.applications.ranking.models import rows
from bilevax.applications.ranking.ratings import Ratings


@dataclasses.dataclass(frozen=True)
class Popularity:
    """Scores an item by how many users had it in training: the same for everybody.

    Example:
      >>> import jax.numpy as jnp
      >>> from bilevax.applications.ranking import Popularity, Ratings
      >>> ratings = Ratings([0, 2, 3], [1, 2, 2], [5.0, 3.0, 4.0], item_count=4)
      >>> Popularity().score(Popularity().count(ratings), 0, jnp.arange(4)).tolist()
      [0.0, 1.0, 2.0, 0.0]
    """

    def count(self, ratings: Ratings) -> Array:
        """x: the number of training pairs of every item."""
        return jnp.zeros(ratings.item_count).at[ratings.items].add(1.0)

    def score(self, x: Array, user: Any, items: Array) -> Array:
        return rows(x, items)
