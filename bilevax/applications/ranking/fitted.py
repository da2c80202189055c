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
      offsets: where the items of every user begin, and where those of the last user end.
      items: the items that each user has in the table, ascending.

    Raises:
      ValueError: the arrays do not fit together, or a parameter is not finite.
    """

    model: Any
    x: PyTree
    user_ids: np.ndarray
    item_ids: np.ndarray
    offsets: np.ndarray
    items: np.ndarray

    def __post_init__(self) -> None:
        check_ids("user_ids", self.user_ids)
        check_ids("item_ids", self.item_ids)
        check_pairs(self.offsets, self.items, len(self.user_ids), len(self.item_ids))
        for name, array in self.x.items():
            if not np.isfinite(array).all():
                raise ValueError(f"the model's parameters must be finite, got NaN or infinity in {name!r}")

    def user_code(self, user: Any) -> int:
        """The place of a user, by its id."""
        return _code("user", user, self.user_ids)

    def item_code(self, item: Any) -> int:
        """The place of an item, by its id."""
        return _code("item", item, self.item_ids)

    def catalogue_scores(self, user: int) -> np.ndarray:
        """The scores of all items for the user at a place."""
        return np.array(_score(self.model, self.x, jnp.asarray(user), len(self.item_ids)))


def check_ids(name: str, ids: np.ndarray) -> None:
    """Raises ValueError unless ids are int64 or strings, at least one, and strictly ascending."""
    if ids.ndim != 1 or not ids.size or not (ids.dtype == np.int64 or ids.dtype.kind == "U"):
        raise ValueError(f"{name} must be a vector of int64 or strings, got shape {ids.shape} of {ids.dtype}")
    if not (ids[1:] > ids[:-1]).all():
        raise ValueError(f"{name} must ascend, and none may occur twice")


def check_pairs(offsets: np.ndarray, items: np.ndarray, users: int, item_count: int) -> None:
    """Raises ValueError unless every user has items of the catalogue, strictly ascending."""
    if offsets.dtype != np.int32 or items.dtype != np.int32 or items.ndim != 1:
        raise ValueError(f"offsets and items must be vectors of int32, got {offsets.dtype} and {items.dtype}")
    if offsets.shape != (users + 1,) or offsets[0] != 0 or offsets[-1] != len(items):
        raise ValueError(f"offsets must be {users + 1} places from 0 to {len(items)}, got others")
    if not (offsets[1:] > offsets[:-1]).all():
        raise ValueError("offsets must ascend: every user has at least one item")
    if items.min() < 0 or items.max() >= item_count:
        raise ValueError(f"items must lie in 0..{item_count - 1}, got {items.min()} to {items.max()}")
    ascending = items[1:] > items[:-1]
    ascending[offsets[1:-1] - 1] = True  # from the last item of a user to the first of the next
    if not ascending.all():
        raise ValueError("the items of each user must ascend, and none may occur twice")


def _code(kind: str, one: Any, ids: np.ndarray) -> int:
    known = f"an id of the table, such as {ids[0].item()!r}"
    wanted = _whole_number(one) if ids.dtype.kind == "i" else one if isinstance(one, str) else None
    if wanted is None:
        raise KeyError(f"{kind} must be {known}, got {one!r}")
    place = int(np.searchsorted(ids, wanted))
    if place >= len(ids) or ids[place] != wanted:
        raise KeyError(f"{kind} must be {known}, got {one!r}, which the table does not have")
    return place


def _whole_number(one: Any) -> int | None:
    """A whole number within int64 as a Python integer: as floats, large ids that differ may be equal."""
    whole = isinstance(one, (int, np.integer)) and not isinstance(one, bool)
    if not whole and not (isinstance(one, (float, np.floating)) and float(one).is_integer()):
        return None
    return int(one) if -(2**63) <= int(one) < 2**63 else None


@jax.jit(static_argnums=(0, 3))
def _score(model: Any, x: PyTree, user: Array, items: int) -> Array:
    return model.score(x, user, jnp.arange(items))
