"""Models that score items for users: matrix factorisation and NeuMF.

A model is any object with the method `score(x, user, items)`: the scores of a vector of items for one user,
given the parameters x. Two more methods are optional: `start(key)` returns the first x, and `score_all(x,
users)` scores all items for many users where that can be done faster. A model may also name the parts of x of
which `score` reads the row of its user alone, `user_tables`: these can then be tables of the problem. Models
hold sizes, not parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

import bilevax as bx
from bilevax.applications.ranking.lists import List, take

PyTree = Any

_UNITS = 16  # hidden units that one pass over the scores adds


@runtime_checkable
class Model(Protocol):
    """What a model must have; `start` is needed only if no x0 is given."""

    def score(self, x: PyTree, user: Array, items: Array) -> Array:
        """The scores of a vector of items for one user."""
        ...


@dataclasses.dataclass(frozen=True)
class MF:
    """Matrix factorisation: ⟨user, item⟩ + the item's bias.

    Args:
      users: the number of users.
      items: the number of items.
      width: the length of the vectors.
      spread: the standard deviation of the vectors at the start.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from bilevax.applications.ranking import MF
      >>> model = MF(users=3, items=5, width=4)
      >>> model.score(model.start(jax.random.key(0)), jnp.asarray(1), jnp.array([0, 4])).shape
      (2,)
    """

    user_tables: ClassVar[tuple[str, ...]] = ("user",)

    users: int
    items: int
    width: int = 64
    spread: float = 0.01

    def __post_init__(self) -> None:
        _check_sizes(self)

    def start(self, key: Array) -> PyTree:
        """Random vectors, biases zero."""
        user, item = jax.random.split(key)
        return {
            "user": self.spread * jax.random.normal(user, (self.users, self.width)),
            "item": self.spread * jax.random.normal(item, (self.items, self.width)),
            "bias": jnp.zeros(self.items),
        }

    def score(self, x: PyTree, user: Array, items: Array) -> Array:
        return take(x["item"], items) @ take(x["user"], user) + take(x["bias"], items)


@dataclasses.dataclass(frozen=True)
class NeuMF:
    """Neural matrix factorisation: a product part and a perceptron part, each with its own vectors.

    score = ⟨w, p_u ⊙ q_i⟩ + ⟨w', dropout(relu(W [p'_u, q'_i] + b))⟩

    W [p'_u, q'_i] is a sum of a user's part and an item's part. The items' parts are computed for the whole
    catalogue at once, so that a list needs no matrix product.

    Args:
      users: the number of users.
      items: the number of items.
      width: the length of all four vectors, and of the hidden layer.
      dropout: the share of hidden units that a training score leaves out.
      spread: the standard deviation of the vectors at the start.

    Reference:
      He et al., *Neural Collaborative Filtering*, WWW 2017.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from bilevax.applications.ranking import NeuMF
      >>> model = NeuMF(users=3, items=5, width=4)
      >>> model.score(model.start(jax.random.key(0)), jnp.asarray(1), jnp.array([0, 4])).shape
      (2,)
    """

    user_tables: ClassVar[tuple[str, ...]] = ("product_user", "perceptron_user")

    users: int
    items: int
    width: int = 64
    dropout: float = 0.0
    spread: float = 0.01

    def __post_init__(self) -> None:
        _check_sizes(self)
        bx.checks.coefficient("dropout", self.dropout, high=0.99, zero=True, optional=False)

    def start(self, key: Array) -> PyTree:
        """Random vectors and weights, biases zero."""
        keys = jax.random.split(key, 7)
        d, glorot = self.width, jax.nn.initializers.glorot_uniform()

        def vectors(key: Array, count: int) -> Array:
            return self.spread * jax.random.normal(key, (count, d))

        hidden = glorot(keys[4], (2 * d, d))
        return {
            "product_user": vectors(keys[0], self.users),
            "product_item": vectors(keys[1], self.items),
            "perceptron_user": vectors(keys[2], self.users),
            "perceptron_item": vectors(keys[3], self.items),
            "hidden_user": hidden[:d],
            "hidden_item": hidden[d:],
            "hidden_bias": jnp.zeros(d),
            "output_product": glorot(keys[5], (d, 1))[:, 0],
            "output_perceptron": glorot(keys[6], (d, 1))[:, 0],
        }

    def score(self, x: PyTree, user: Array, items: Array, noise: bx.Stream | None = None) -> Array:
        """The scores; with `noise` they are training scores, with dropout."""
        product = take(x["product_item"], items) @ (take(x["product_user"], user) * x["output_product"])
        catalogue = x["perceptron_item"] @ x["hidden_item"]
        own = take(x["perceptron_user"], user) @ x["hidden_user"] + x["hidden_bias"]
        hidden = jax.nn.relu(take(catalogue, items) + own)
        if noise is not None and self.dropout:
            kept = noise.bits(hidden.shape) >= jnp.uint32(int(self.dropout * 2**32))
            hidden = jnp.where(kept, hidden / (1 - self.dropout), 0)
        return product + hidden @ x["output_perceptron"]

    def score_all(self, x: PyTree, users: Array) -> Array:
        """(users, items): the scores of all items for many users; no hidden layer is held in memory."""
        product = (take(x["product_user"], users) * x["output_product"]) @ x["product_item"].T
        own = take(x["perceptron_user"], users) @ x["hidden_user"] + x["hidden_bias"]
        catalogue = x["perceptron_item"] @ x["hidden_item"]
        units = -(-self.width // _UNITS)

        def in_passes(by_unit: Array) -> Array:  # padded with units of weight zero
            padded = jnp.pad(by_unit, [(0, units * _UNITS - self.width)] + [(0, 0)] * (by_unit.ndim - 1))
            return padded.reshape(units, _UNITS, *by_unit.shape[1:])

        def add(scores: Array, layer: tuple[Array, Array, Array]) -> tuple[Array, None]:
            for weight, user, item in zip(*layer, strict=True):
                scores = scores + weight * jax.nn.relu(user[:, None] + item[None, :])
            return scores, None

        layers = (in_passes(x["output_perceptron"]), in_passes(own.T), in_passes(catalogue.T))
        return jax.lax.scan(add, product, layers)[0]


def all_scores(model: Any, x: PyTree, users: Array, item_count: int) -> Array:
    """(users, items): the scores of all items; by `model.score_all` if there is one."""
    if callable(getattr(model, "score_all", None)):
        return model.score_all(x, users)
    catalogue = jnp.arange(item_count, dtype=jnp.int32)
    return jax.vmap(lambda user: model.score(x, user, catalogue))(users)


def list_scores(model: Any, x: PyTree, batch: List) -> Array:
    """The training scores of a list."""
    if getattr(model, "dropout", 0):
        return model.score(x, batch.user, batch.items, batch.noise)
    return model.score(x, batch.user, batch.items)


def user_tables(model: Any, lazy: bool) -> dict[str, Any] | None:
    """The tables of a problem whose users' vectors move lazily; None if all of x moves in every step.

    Raises:
      ValueError: lazily, but the model does not name them.
    """
    if not lazy:
        return None
    names = getattr(model, "user_tables", ())
    if not names:
        raise ValueError(f"lazy=True needs a model with user_tables, got {type(model).__name__} without them")
    return dict.fromkeys(names, _user_of)


def with_user_row(model: Any, x: PyTree, batch: List) -> tuple[PyTree, List]:
    """x in which a user's own row is a table of one row, and the list of that table's only user."""
    rows = {name: x[name][None] for name in model.user_tables}
    return x | rows, dataclasses.replace(batch, user=jnp.zeros_like(batch.user))


def _user_of(block: Any, batch: List | None) -> Array | None:
    return None if batch is None else batch.user


def _check_sizes(model: Any) -> None:
    for name in ("users", "items", "width"):
        bx.checks.whole_number(name, getattr(model, name), 1)
    bx.checks.coefficient("spread", model.spread, optional=False)
