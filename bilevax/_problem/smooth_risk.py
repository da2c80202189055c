r"""Risks near those that have kinks, but smooth: what exact steps minimise on the way to a kink.

Where the minimum of a risk is at a kink, as where two groups are the worst, gradients on either side say
nothing about the way along it. A smooth risk of a small width has its minimum near by, and gradients that
lead there. Its values differ from those of the risk by about the width, which is no part of the program.
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

_HALVINGS = 60  # of where the threshold may be, down to rounding
_FAR = 30.0  # widths beyond all values, where the threshold is not


class SmoothRisk(eqx.Module):
    """What `Exact` asks of a risk.

    Attributes:
      width: by how much values may differ that count about alike, in the units of f.
    """

    width: Array

    @abc.abstractmethod
    def of(self, values: Array, blocks: Array | None = None) -> Array:
        """The risk of the values of all blocks."""

    @abc.abstractmethod
    def weights_of(self, values: Array, blocks: Array | None = None) -> Array:
        """m ∂ρ/∂f_i."""


class SmoothTail(SmoothRisk):
    r"""min_c c + T/(share m) Σ log(1 + exp((f_i − c)/T)): a CVaR for T → 0."""

    share: float = eqx.field(static=True)

    def of(self, values: Array, blocks: Array | None = None) -> Array:
        threshold = self._threshold(values)
        excess = self.width * jax.nn.softplus((values - threshold) / self.width)
        return threshold + jnp.mean(excess) / self.share

    def weights_of(self, values: Array, blocks: Array | None = None) -> Array:
        return jax.nn.sigmoid((values - self._threshold(values)) / self.width) / self.share

    def _threshold(self, values: Array) -> Array:
        """The c at which the weights have a mean of one."""

        def halved(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            middle = (low + high) / 2
            too_low = jnp.mean(jax.nn.sigmoid((values - middle) / self.width)) > self.share
            return jnp.where(too_low, middle, low), jnp.where(too_low, high, middle)

        ends = jnp.min(values) - _FAR * self.width, jnp.max(values) + _FAR * self.width
        low, high = jax.lax.fori_loop(0, _HALVINGS, halved, ends)
        return (low + high) / 2


class SmoothWorst(SmoothRisk):
    r"""T log of the mean over groups of exp(mean of f / T): the worst group for T → 0.

    Attributes:
      groups: the group of every block; None if each is one.
      count: how many groups there are, if they are given.
    """

    groups: Array | None = None
    count: int = eqx.field(static=True, default=0)

    def of(self, values: Array, blocks: Array | None = None) -> Array:
        means = self._means(values)
        return self.width * (jax.nn.logsumexp(means / self.width) - jnp.log(len(means)))

    def weights_of(self, values: Array, blocks: Array | None = None) -> Array:
        parts = jax.nn.softmax(self._means(values) / self.width)
        if self.groups is None:
            return parts * len(values)
        return (parts * len(values) / self._counts(values))[self.groups]

    def _means(self, values: Array) -> Array:
        if self.groups is None:
            return values
        return jnp.zeros(self.count, values.dtype).at[self.groups].add(values) / self._counts(values)

    def _counts(self, values: Array) -> Array:
        return jnp.zeros(self.count, values.dtype).at[self.groups].add(1)


@jax.jit
def smooth_value(risk: SmoothRisk, values: Array) -> Array:
    """The risk of the values of all blocks, compiled once for all widths."""
    return risk.of(values)
