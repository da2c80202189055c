"""What a tracker works on: the slots that a step visits, and what the step saw there."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._problem.levels import Level
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._step.clocks import Clock, Clocks
from bilevax._step.lagrangian import Gradients, Point
from bilevax._step.slots import Memory, Moving
from bilevax._util.trees import PyTree, combine, spread, where_slot


class Rates(eqx.Module):
    """The coefficients of one level at one step; None where the method or the level does not use one."""

    alpha: Any
    gamma: Any
    alpha_bar: Any
    gamma_bar: Any
    lower_step: Any
    inverse_step: Any
    radius: Any
    floor: Any
    lower_scales: Any
    inverse_scales: Any


class Visit(eqx.Module):
    """One level's part of a step: the gathered memory of its slots, and how to read it.

    Attributes:
      rows: the memory of the touched slots.
      step: t.
      corrected: whether the method also looks at time t−1.
      lazy: whether all slots move, caught up when visited; else only the visited ones move.
      slot_axes: how many leading axes of `rows` count slots.
      level: the level itself.
      transformation: the optax transformation that moves y, if not plain steps do.
    """

    rows: Memory
    clocks: Clocks
    rates: Any  # Rates, or a subclass of a method's own
    step: Array
    name: str = eqx.field(static=True)
    corrected: bool = eqx.field(static=True)
    lazy: bool = eqx.field(static=True)
    slot_axes: int = eqx.field(static=True)
    level: Level | None = None
    transformation: optax.GradientTransformation | None = None

    @property
    def recent(self) -> Array:
        """Which of the slots were visited in the step before this one."""
        return self.rows.visit == self.step - 1

    @property
    def stamped(self) -> Array | None:
        """The `visit` to store."""
        return None if self.rows.visit is None else jnp.broadcast_to(self.step, self.rows.visit.shape)

    def signed(self, slope: PyTree) -> PyTree:
        """What y descends along, from the gradient of what it optimises; see `Level.signed`."""
        return slope if self.level is None else self.level.signed(slope)

    def bounded(self, y: PyTree) -> PyTree:
        """y projected onto the set of its level, if that has one."""
        return y if self.level is None else self.level.bounded(y, self.slot_axes)

    @property
    def confined(self) -> bool:
        """Whether y must stay in a set."""
        return self.level is not None and self.level.is_bounded

    def on_free(self, v: PyTree, y: PyTree) -> PyTree:
        """v on the entries of y that are free to move; see `Level.on_free`."""
        return v if self.level is None else self.level.on_free(v, y)

    def recall(self, moving: Moving, clock: Clock) -> list[PyTree]:
        """A moving variable at times t and t−1."""
        now = moving.at(clock.now)
        if not self.corrected:
            return [now]
        if self.lazy:
            return [now, moving.at(clock.before)]
        undone = combine((1, moving.value), (clock.now - clock.before, moving.last_slope))
        return [now, where_slot(self.recent, undone, moving.value)]

    def move(self, value: PyTree, slope: PyTree, clock: Clock, step: Array, earlier: PyTree = None) -> Moving:
        """What to store of a variable that has this value now and moves along this slope.

        With an `earlier` slope it takes the present step along that one, and only then turns.
        """
        shape = jax.tree.leaves(value)[0].shape[: self.slot_axes]
        if self.lazy and earlier is None:
            return Moving(value, slope, clock.stamp(shape))
        moved = combine((1, value), (-step, slope if earlier is None else earlier))
        return Moving(moved, slope, clock.advance(step).stamp(shape) if self.lazy else None, earlier)


class Look(NamedTuple):
    """What a step sees: lists hold one entry per point, [now] or [now, before].

    Attributes:
      problem: the problem.
      sample: the blocks and rows of the step.
      points: x and y.
      v: per level, ≈ [∇²_yy g]⁻¹ ∇_y f.
      gradients: those of ℓ; at the point before, that by x is negated (see `lagrangian.gradients`).
      store: the stored gradients after this look, where a method keeps them.
    """

    problem: Problem
    sample: Sample
    points: list[Point]
    v: list[dict[str, PyTree]]
    gradients: list[Gradients]
    store: PyTree = None

    def weighed(self, tree: PyTree) -> PyTree:
        """A tree with the sampled blocks as leading axis, times their weights under a risk."""
        weights = self.points[0].weights
        return tree if weights is None else jax.tree.map(lambda a: spread(weights, a) * a, tree)
