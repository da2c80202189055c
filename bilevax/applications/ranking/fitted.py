"""A trained model together with the ids of its users and items."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a recommender knows after training.

    Attributes:
      model: scores items.
      x: its parameters.
      user_ids: the id of every user, ascending.
      item_ids: the id of every item, ascending.
      offsets: where the items of every user begin, and of the last one end.
      items: the items that the users have had.
    """

    model: Any
    x: PyTree
    user_ids: np.ndarray
    item_ids: np.ndarray
    offsets: np.ndarray
    items: np.ndarray

    def user_code(self, user: Any) -> int:
        """The place of a user, by its id."""
        return _code("user", user, self.user_ids)

    def item_code(self, item: Any) -> int:
        """The place of an item, by its id."""
        return _code("item", item, self.item_ids)

    def catalogue_scores(self, user: int) -> np.ndarray:
        """The scores of all items for the user at a place."""
        return np.array(_score(self.model, self.x, jnp.asarray(user), len(self.item_ids)))


def _code(kind: str, one: Any, ids: np.ndarray) -> int:
    known = f"an id of the table, such as {ids[0].item()!r}"
    kinds = str if ids.dtype.kind == "U" else (int, float, np.number)
    if isinstance(one, bool) or not isinstance(one, kinds):
        raise KeyError(f"{kind} must be {known}, got {one!r}")
    place = int(np.searchsorted(ids, one))
    if place >= len(ids) or ids[place] != one:
        raise KeyError(f"{kind} must be {known}, got {one!r}, which the table does not have")
    return place


@jax.jit(static_argnums=(0, 3))
def _score(model: Any, x: PyTree, user: Array, items: int) -> Array:
    return model.score(x, user, jnp.arange(items))
