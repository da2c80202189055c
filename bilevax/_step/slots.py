"""What is stored per slot of a lower level, and how slots are read and written."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._step.clocks import CompensatedSum
from bilevax._step.ordering import read_once
from bilevax._util.trees import PyTree, spread, step_along, where_slot

NEVER = -2  # a last visit that no step's predecessor equals


class Moving(eqx.Module):
    """A per-slot variable with the direction it moves along.

    Attributes:
      value: the variable, at the slot's last visit if it moves lazily, else now.
      slope: the tracked gradient it descends along.
      stamp: the clock at the last visit; None if only sampled slots move.
      earlier: the slope of the step that ended at the stamp, where the variable turns into `slope` only then;
        or minus the last move of an optax transformation, where a method undoes it.
      optimizer: the state of the slots' optax transformations, if these move the variable.
    """

    value: PyTree
    slope: PyTree
    stamp: CompensatedSum | None
    earlier: PyTree = None
    optimizer: PyTree = None

    @property
    def last_slope(self) -> PyTree:
        """What the last step was along."""
        return self.slope if self.earlier is None else self.earlier

    def at(self, time: CompensatedSum) -> PyTree:
        """The value caught up to a reading of the clock."""
        if self.stamp is None:
            return self.value
        # A state that came out of a vmap has clocks and stamps with one more leading axis.
        missing = self.stamp.high.ndim - time.high.ndim
        aligned = jax.tree.map(lambda a: a.reshape(a.shape + (1,) * missing), time)
        passed = aligned - self.stamp
        slope = self.slope if self.earlier is None else where_slot(passed < 0, self.earlier, self.slope)
        return step_along(self.value, passed, slope)


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

    def parts(self) -> list[tuple[str, PyTree]]:
        """The stored quantities by their letters, causes before effects."""
        if not isinstance(self.y, Moving):
            return [("mean", self.y)]
        parts: list[tuple[str, PyTree]] = [("s", self.y.slope), ("y", self.y.value)]
        parts += [("H", self.hessian)] if self.hessian is not None else []
        return parts + ([("u", self.v.slope), ("v", self.v.value)] if self.v is not None else [])

    def unvisited(self, now: Array) -> Memory:
        """The memory of slots that no step has visited, if `now` is true; else itself."""
        if self.visit is None:
            return self
        return dataclasses.replace(self, visit=jnp.where(now, NEVER, self.visit))

    @property
    def lazy(self) -> set[str]:
        """The letters of the variables that move between visits."""
        variables = {"y": self.y, "v": self.v}
        return {n for n, one in variables.items() if isinstance(one, Moving) and one.stamp is not None}


def gather(memory: PyTree, slots: Array) -> PyTree:
    """The slots' rows of every array. A single slot is sliced; an array of one slot is returned whole."""

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


def project_ball(tree: PyTree, radius: Array | None, slot_axes: int) -> PyTree:
    """Each slot's tree projected onto the ball of that radius; `slot_axes` leading axes are slots."""
    if radius is None:
        return tree
    leaves = jax.tree.leaves(tree)
    squares = sum(jnp.sum(jnp.square(leaf), axis=tuple(range(slot_axes, leaf.ndim))) for leaf in leaves)
    size = jnp.sqrt(squares)
    factor = jnp.where(size > radius, radius / jnp.where(size > 0, size, 1), 1)
    return jax.tree.map(lambda leaf: spread(factor, leaf) * leaf, tree)
