"""What is remembered per slot, and how a slot that was not visited catches up.

Between two visits at t₀ and t a slot moves along a constant direction, so its value is recovered from
what was stored at t₀ and the sum of the steps since: y_t = y − (Σ_{k=t₀}^{t−1} τ_k) s. The sums are read
off a clock. A clock is a compensated sum of two floats: its differences keep full relative precision
after millions of steps in float32, for any schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax.trees import PyTree, spread, step_along

_LARGE = 2**16  # numbers from which an array is worth an operation more that spares a copy


class Reading(eqx.Module):
    """A reading of a clock: the unevaluated sum high + low."""

    high: Array
    low: Array

    def __sub__(self, other: Reading) -> Array:
        return (self.high - other.high) + (self.low - other.low)

    def __add__(self, step: Array) -> Reading:
        """Knuth's two-sum, then a renormalisation."""
        step = jnp.asarray(step, self.high.dtype)
        total = self.high + step
        shadow = total - self.high
        low = self.low + ((self.high - (total - shadow)) + (step - shadow))
        top = total + low
        return Reading(top, low - (top - total))


class Clock(eqx.Module):
    """The sum of all steps so far, at time t (`now`) and at time t−1 (`before`)."""

    now: Reading
    before: Reading

    @staticmethod
    def start(dtype: Any) -> Clock:
        return Clock(_zero((), dtype), _zero((), dtype))

    def advance(self, step: Array) -> Clock:
        """Moves on by one step."""
        return Clock(self.now + step, self.now)

    def stamp(self, shape: tuple[int, ...]) -> Reading:
        """The present reading, for slots of that shape."""
        return jax.tree.map(lambda a: jnp.broadcast_to(a, shape), self.now)


class Clocks(eqx.Module):
    """The clocks of one level: of y's steps and of v's.

    All readings are one small array: each number by itself would be a launch or two of every step.
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

    def _clock(self, place: int) -> Clock:
        numbers = [self.readings[..., place, part] for part in range(4)]
        return Clock(Reading(*numbers[:2]), Reading(*numbers[2:]))


class Moving(eqx.Module):
    """A per-slot variable with the direction it moves along.

    Attributes:
      value: the variable, at the slot's last visit if it moves lazily, else now.
      slope: the tracked gradient it descends along.
      stamp: the clock at the last visit; None if only sampled slots move.
    """

    value: PyTree
    slope: PyTree
    stamp: Reading | None

    def at(self, time: Reading) -> PyTree:
        """The value caught up to a reading of the clock."""
        if self.stamp is None:
            return self.value
        # A state that came out of a vmap has clocks and stamps with one more leading axis.
        missing = self.stamp.high.ndim - time.high.ndim
        aligned = jax.tree.map(lambda a: a.reshape(a.shape + (1,) * missing), time)
        return step_along(self.value, aligned - self.stamp, self.slope)


class Memory(eqx.Module):
    """All that is stored for the slots of one lower level; every leaf has the slots as leading axis.

    Attributes:
      y: the lower variable (for a mean level the tracked mean itself).
      v: the tracked solution of ∇²_yy g v = ∇_y f, where it is tracked.
      hessian: the tracked Hessian, where it is tracked.
      previous: the Hessian, or the mean, before its last refresh.
      visit: the step of the last visit, where a corrected method keeps `previous` or is not lazy.
    """

    y: Moving | PyTree
    v: Moving | None = None
    hessian: Array | None = None
    previous: PyTree = None
    visit: Array | None = None


def gather(memory: PyTree, slots: Array) -> PyTree:
    """The slots' rows of every array; one slot's row is cut out, the row of a single slot is all there is."""

    def take(a: Array) -> Array:
        if slots.shape != (1,):
            return a.at[slots].get(mode="promise_in_bounds")
        if a.shape[0] == 1:
            return a
        return jax.lax.dynamic_slice_in_dim(a, slots[0], 1, allow_negative_indices=False)

    several = any(a.shape[0] > 1 for a in jax.tree.leaves(memory))
    if slots.shape == (1,) and several and jax.default_backend() == "cpu":
        return read_once(lambda: jax.tree.map(take, memory), slots)
    return jax.tree.map(take, memory)


def read_once(read: Callable[[], PyTree], slots: Array) -> PyTree:
    """Slots that are written to afterwards, as read by a function.

    A read may be merged into every computation that uses it, some of which come after the write: the compiler
    then copies the whole memory in every step. It does not look into a cond.
    """
    blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(read))
    return jax.lax.cond(slots[0] >= 0, read, lambda: blank)


def scatter(memory: PyTree, slots: Array, rows: PyTree, distinct: bool = True) -> PyTree:
    """The memory with the slots' rows replaced; `distinct` promises that no slot occurs twice."""

    def put(a: Array, b: Array) -> Array:
        if slots.shape != (1,):
            return a.at[slots].set(b, mode="promise_in_bounds", unique_indices=distinct)
        if a.shape[0] == 1:
            return b.astype(a.dtype)
        return jax.lax.dynamic_update_slice_in_dim(
            a, b.astype(a.dtype), slots[0], 0, allow_negative_indices=False
        )

    return jax.tree.map(put, memory, rows)


def after(slots: Array, count: int, value: PyTree) -> Array:
    """The same slots of so many, but known only when a value is.

    A memory is then read for the value before it is written at the slots. Without that order between the two,
    the compiler copies all of it in every step.
    """
    firsts = [jnp.isnan(leaf[(0,) * leaf.ndim]) for leaf in jax.tree.leaves(value) if leaf.size]
    never = functools.reduce(jnp.logical_or, firsts)
    return jnp.minimum(slots, count - 1 + never.astype(slots.dtype))


def known_after(value: PyTree, tree: PyTree) -> PyTree:
    """The same tree, but large arrays of it are known only when the value is.

    For x and the x before it, which change places in a step: without an order between what is computed from
    them and what replaces them, the compiler first makes a copy of both.
    """

    def late(array: Array, value: Array) -> Array:
        if array.size < _LARGE:
            return array
        first = value[(0,) * value.ndim]
        return array * jnp.minimum(1, 1 + jnp.isnan(first).astype(jnp.float32)).astype(array.dtype)

    return jax.tree.map(late, tree, value)


def project_ball(tree: PyTree, radius: Array | None, slot_axes: int) -> PyTree:
    """Each slot's tree projected onto the ball of that radius; `slot_axes` leading axes are slots."""
    if radius is None:
        return tree
    leaves = jax.tree.leaves(tree)
    squares = sum(jnp.sum(jnp.square(leaf), axis=tuple(range(slot_axes, leaf.ndim))) for leaf in leaves)
    size = jnp.sqrt(squares)
    factor = jnp.where(size > radius, radius / jnp.where(size > 0, size, 1), 1)
    return jax.tree.map(lambda leaf: spread(factor, leaf) * leaf, tree)


def _zero(shape: tuple[int, ...], dtype: Any) -> Reading:
    return Reading(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
