"""Discounts: what a relevant item is worth at a rank, one at the top and less further down.

The parameters of a discount are arrays. Changing them compiles nothing, and `jax.vmap` can run over them.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

import bilevax as bx


class Discount(eqx.Module):
    """The base class of discounts."""

    def __call__(self, rank: Array) -> Array:
        """The worth of an item at a rank: 1 at rank 1, then falling."""
        raise NotImplementedError


class Logarithmic(Discount):
    """1 / log₂(1 + rank): the discount of NDCG.

    Example:
      >>> from bilevax.applications.ranking import Logarithmic
      >>> float(Logarithmic()(3.0))
      0.5
    """

    def __call__(self, rank: Array) -> Array:
        return 1 / jnp.log2(1 + rank)


class Power(Discount):
    r"""1 − (rankᵖ − 1)/(lastᵖ − 1): falls from 1 at the top to 0 at `last`.

    The force on an item is p rank^(p−1) for every item above it: the nearer p is to 1, the harder a relevant
    item far down is pulled up. NDCG's discount, whose force is 1/(rank log² rank), hardly moves it.

    Args:
      depth: p > 0.
      last: the rank at which an item is worth nothing; usually the number of items.

    Example:
      >>> from bilevax.applications.ranking import Power
      >>> float(Power(depth=0.5, last=100.0)(100.0))
      0.0
    """

    depth: Any
    last: Any

    def __check_init__(self) -> None:
        bx.checks.coefficient("depth", self.depth, optional=False)
        bx.checks.coefficient("last", self.last, low=1.0, optional=False)

    def __call__(self, rank: Array) -> Array:
        return 1 - (rank**self.depth - 1) / (self.last**self.depth - 1)
