"""Clocks that lazy slots catch up with: sums of all steps so far.

Between two visits at t₀ and t a slot moves along a constant direction, so its value follows from what was
stored at t₀ and the sum of the steps since: y_t = y − (Σ_{k=t₀}^{t−1} τ_k) s. A clock holds that sum as two
floats. Its differences keep full relative precision after millions of float32 steps, for any schedule.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array


class CompensatedSum(eqx.Module):
    """A sum of many terms as two floats, high + low, which together keep its rounding error."""

    high: Array
    low: Array

    def __sub__(self, other: CompensatedSum) -> Array:
        return (self.high - other.high) + (self.low - other.low)

    def __add__(self, step: Array) -> CompensatedSum:
        """Knuth's two-sum, then a renormalisation."""
        step = jnp.asarray(step, self.high.dtype)
        total = self.high + step
        shadow = total - self.high
        low = self.low + ((self.high - (total - shadow)) + (step - shadow))
        top = total + low
        return CompensatedSum(top, low - (top - total))


class Clock(eqx.Module):
    """The sum of all steps so far, at time t (`now`) and at time t−1 (`before`)."""

    now: CompensatedSum
    before: CompensatedSum

    @staticmethod
    def start(dtype: Any) -> Clock:
        return Clock(_zero((), dtype), _zero((), dtype))

    def advance(self, step: Array) -> Clock:
        """Moves on by one step."""
        return Clock(self.now + step, self.now)

    @property
    def at_rest(self) -> Clock:
        """The clock that reads the same at time t−1 as at time t."""
        return Clock(self.now, self.now)

    def stamp(self, shape: tuple[int, ...]) -> CompensatedSum:
        """The present reading, for slots of that shape."""
        return jax.tree.map(lambda a: jnp.broadcast_to(a, shape), self.now)


class Clocks(eqx.Module):
    """The clocks of one level: of y's steps and of v's.

    All readings are one small array: as separate scalars they would cost a step several kernel launches.
    """

    readings: Array  # (…, 2, 4)

    def __init__(self, y: Clock, v: Clock):
        self.readings = jnp.stack([jnp.stack(jax.tree.leaves(clock), axis=-1) for clock in (y, v)], axis=-2)

    @property
    def y(self) -> Clock:
        return self._clock(0)

    @property
    def v(self) -> Clock:
        return self._clock(1)

    @property
    def at_rest(self) -> Clocks:
        """The clocks that read the same at time t−1 as at time t."""
        return Clocks(self.y.at_rest, self.v.at_rest)

    def _clock(self, place: int) -> Clock:
        numbers = [self.readings[..., place, part] for part in range(4)]
        return Clock(CompensatedSum(*numbers[:2]), CompensatedSum(*numbers[2:]))


def _zero(shape: tuple[int, ...], dtype: Any) -> CompensatedSum:
    return CompensatedSum(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
