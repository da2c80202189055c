r"""Smooth stand-ins ℓ(z) for "that item is ranked above this one", z the difference of their scores.

A rank is the sum over all items of 1(s_j ≥ s_i), the item's own term included. A surrogate replaces the
indicator; `own` is the constant that replaces the item's own term.

The parameters of a surrogate are arrays. Changing them compiles nothing, and `jax.vmap` can run over them.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import bilevax as bx


class Surrogate(eqx.Module):
    """The base class of surrogates."""

    @property
    def own(self) -> Any:
        """The item's own term: the smallest possible rank."""
        return 1.0

    def __call__(self, difference: Array) -> Array:
        """ℓ(s_j − s_i)."""
        raise NotImplementedError


class SquaredHinge(Surrogate):
    """ℓ(z) = max(z + c, 0)²: the paper's surrogate. Items far above weigh with the square of their distance.

    Args:
      margin: c.

    Example:
      >>> from bilevax.applications.ranking import SquaredHinge
      >>> float(SquaredHinge(margin=1.0)(0.5))
      2.25
    """

    margin: float | Array = 1.0

    def __check_init__(self) -> None:
        bx.checks.coefficient("margin", self.margin, optional=False)

    @property
    def own(self) -> Any:
        return self.margin**2

    def __call__(self, difference: Array) -> Array:
        return jnp.square(jnp.maximum(difference + self.margin, 0))


class Logistic(Surrogate):
    """ℓ(z) = log₂(1 + exp(z/T)): grows linearly, and is 1 at 0.

    Args:
      temperature: T.

    Example:
      >>> from bilevax.applications.ranking import Logistic
      >>> round(float(Logistic()(0.0)), 6)
      1.0
    """

    temperature: float | Array = 1.0

    def __check_init__(self) -> None:
        bx.checks.coefficient("temperature", self.temperature, optional=False)

    def __call__(self, difference: Array) -> Array:
        return jax.nn.softplus(difference / self.temperature) / jnp.log(2.0)


class Sigmoid(Surrogate):
    """ℓ(z) = 1/(1 + exp(−z/T)): bounded, so that no item counts for more than 1. The own term is 1.

    Args:
      temperature: T; as T → 0 the sum becomes the rank itself.

    Example:
      >>> from bilevax.applications.ranking import Sigmoid
      >>> float(Sigmoid(temperature=0.5)(0.0))
      0.5
    """

    temperature: float | Array = 1.0

    def __check_init__(self) -> None:
        bx.checks.coefficient("temperature", self.temperature, optional=False)

    def __call__(self, difference: Array) -> Array:
        return jax.nn.sigmoid(difference / self.temperature)
