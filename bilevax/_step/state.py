"""What a run carries from step to step, and what a step reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.bounds import Box, Set
from bilevax._problem.lookups import part_of, with_part, without_parts
from bilevax._problem.problem import Problem, moved
from bilevax._problem.sampling import Sample, Sampler
from bilevax._step.averaging import average_of, with_average
from bilevax._step.block_values import BlockValues
from bilevax._step.clocks import Clocks
from bilevax._step.lazy_tables import LazyTables
from bilevax._step.slots import Moving
from bilevax._step.smoothness import Smoothness
from bilevax._util.hurried import HurriedJit
from bilevax._util.trees import PyTree, spread, zeros_like


class Along(eqx.Module):
    """How to recover x before a plain step: it moved by η along z, so the earlier x is not stored.

    Attributes:
      amount: η; 0 before the first step.
    """

    amount: Array

    def from_(self, x: PyTree, z: PyTree) -> PyTree:
        """x one step earlier."""
        # A state that came out of a vmap has an amount per run.
        return jax.tree.map(lambda a, slope: a + spread(self.amount, slope) * slope, x, z)


class Restraint(eqx.Module):
    """What a run that went back after a blow-up multiplies its steps by (see `Recovery`).

    Attributes:
      upper: the factor of the step of x.
      lower: the factor of those of y and v.
    """

    upper: Array
    lower: Array

    @classmethod
    def none(cls, dtype: Any) -> Restraint:
        """Factors of one."""
        return cls(jnp.ones((), dtype), jnp.ones((), dtype))


class State(eqx.Module):
    """The state of a run: a pytree of arrays.

    Attributes:
      step: how many steps were taken.
      x: the upper variable.
      z: the tracked ∇F.
      back: x one step earlier, or how to recover it; None if the method does not look back.
      optimizer: the state of the optax transformation, if `upper_step` is one.
      levels: the per-slot memory of each lower level.
      clocks: per level, the sums of steps that lazy slots catch up with.
      smoothness: the estimates of L_g, where a step was left out.
      floors: the floors of the tracked Hessians, where they were left out.
      sampler: the plan of sampling.
      store: the stored gradients of a method that keeps them; else None.
      named: whether the lower levels have names.
      multipliers: the levels whose stored v is [∇²_yy g]⁻¹ ∇_y f.
      restraint: factors of the steps; None if the method does not use them.
      centres: the levels whose y is stored as an offset from a(x), each with its a.
      domains: the sets that the y of some levels are projected onto when they are caught up.
      blocks: the tracked f of every block, under a risk; else None.
      tables: the tables of x, where they are caught up when they are looked up; x and z then have None in
        their places, and `settled` is the state that has all of x and z.
    """

    step: Array
    x: PyTree
    z: PyTree
    back: PyTree
    optimizer: PyTree
    levels: dict[str, Any]
    clocks: dict[str, Clocks]
    smoothness: dict[str, Smoothness]
    floors: dict[str, Array]
    sampler: Sampler
    named: bool = eqx.field(static=True)
    multipliers: tuple[str, ...] = eqx.field(static=True, default=())
    centres: tuple[tuple[str, Callable[[PyTree], PyTree]], ...] = eqx.field(static=True, default=())
    domains: tuple[tuple[str, Box | Set], ...] = eqx.field(static=True, default=())
    store: PyTree = None
    restraint: Restraint | None = None
    blocks: BlockValues | None = None
    tables: LazyTables | None = None

    @property
    def settled(self) -> State:
        """The state with all of x and z, tables caught up with the present step; itself without tables.

        It is for reading: a run goes on from the state itself.
        """
        if self.tables is None:
            return self
        x, z, mean = _whole(self.tables, self.step)
        optimizer = with_average(self.optimizer, lambda average: _with_parts(average, mean))
        x, z = _with_parts(self.x, x), _with_parts(self.z, z)
        return dataclasses.replace(self, x=x, z=z, optimizer=optimizer, tables=None)

    def at(self, sample: Sample) -> State:
        """The state as a sample sees it: x, now and before, has what it looks up in place of tables.

        z has zeros there: what a step makes of them is what it adds to z.
        """
        if self.tables is None:
            return self
        found, before = self.tables.look_up(sample, self.step)
        back = _with_parts(self.x if self.back is None else self.x_before, before)
        x, z = _with_parts(self.x, found), _with_parts(self.z, zeros_like(found))
        return dataclasses.replace(self, x=x, z=z, back=back)

    def apart(self, z: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """z without tables, as the state has it, and what a step adds to the tables' rows."""
        names = [] if self.tables is None else self.tables.names
        added = {name: part_of(z, name) for name in names}
        return without_parts(z, names), added

    @property
    def upper_factor(self) -> Array | float:
        """The factor of the step of x."""
        return 1.0 if self.restraint is None else self.restraint.upper

    @property
    def lower_factor(self) -> Array | float:
        """The factor of the steps of y and v."""
        return 1.0 if self.restraint is None else self.restraint.lower

    @property
    def x_before(self) -> PyTree:
        """x one step earlier; None if the method does not look back."""
        return self.back.from_(self.x, self.z) if isinstance(self.back, Along) else self.back

    def at_rest(self, now: Array) -> State:
        """The state that does not know where it was one step earlier, if `now` is true; else itself."""
        if self.back is None and self.tables is None:
            return self
        before = Along(jnp.zeros_like(self.back.amount)) if isinstance(self.back, Along) else self.x
        before = (
            None if self.back is None else before
        )  # all of x is a table, or the method does not look back
        clocks = {name: one.at_rest for name, one in self.clocks.items()}
        pace, still = (None, None) if self.tables is None else (self.tables.pace, self.tables.at_rest.pace)
        back, clocks, pace = jax.tree.map(
            lambda new, old: jnp.where(now, new, old),
            (before, clocks, still),
            (self.back, self.clocks, pace),
        )
        tables = None if self.tables is None else dataclasses.replace(self.tables, pace=pace)
        levels = {name: table.unvisited(now) for name, table in self.levels.items()}
        return dataclasses.replace(self, back=back, clocks=clocks, levels=levels, tables=tables)

    def weights(self, problem: Problem, sample: Sample) -> Array | None:
        """The weights of the sampled blocks under a risk; None if they all are one."""
        if problem.risk is None or self.blocks is None:
            return None
        return self.blocks.weigh(problem.risk, sample)

    @property
    def average(self) -> PyTree:
        """The average of x that an `averaged` upper step keeps; x itself without one."""
        settled = self.settled
        return average_of(settled.optimizer, settled.x)

    @property
    def y(self) -> PyTree:
        """The lower variables, all caught up with the present step."""
        y = {n: _current_y(memory, self.clocks[n]) for n, memory in self.levels.items()}
        for name, project in self.domains:
            y[name] = project(y[name], 1 + jnp.ndim(self.step))  # a state may come out of a vmap
        for name, centre in self.centres:

            def position(x: PyTree, offset: PyTree, centre: Any = centre) -> PyTree:
                return moved(offset, centre(x))

            for _ in range(jnp.ndim(self.step)):  # a state that came out of a vmap
                position = jax.vmap(position)
            y[name] = position(self.x, y[name])
        return self._view(y)

    @property
    def v(self) -> PyTree:
        """The tracked [∇²_yy g]⁻¹ ∇_y f, caught up; None for levels that do not track it.

        It is zero where bounds hold y. Its projection onto the ball of `radius` is applied when a slot is
        next visited.
        """
        tracked = {n: _current_v(self.levels[n], self.clocks[n]) for n in self.multipliers}
        for name, domain in self.domains:
            if name in tracked:
                free = domain.free(domain(_current_y(self.levels[name], self.clocks[name])))
                tracked[name] = jax.tree.map(lambda v, free: jnp.where(free, v, 0), tracked[name], free)
        return self._view({name: tracked.get(name) for name in self.levels})

    def _view(self, by_level: dict[str, PyTree]) -> PyTree:
        return by_level if self.named else next(iter(by_level.values()))


def _with_parts(tree: PyTree, parts: dict[str, PyTree]) -> PyTree:
    """x or z with these parts in place of tables."""
    for name, part in parts.items():
        tree = with_part(tree, name, part)
    return tree


# Compiled: one pass over the memory, without arrays in between.
@HurriedJit
def _whole(tables: LazyTables, step: Array) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    whole = LazyTables.whole
    for _ in range(jnp.ndim(step)):  # a state that came out of a vmap
        whole = jax.vmap(whole)
    return whole(tables, step)


@HurriedJit
def _current_y(memory: Any, clocks: Clocks) -> PyTree:
    return memory.y.at(clocks.y.now) if isinstance(memory.y, Moving) else memory.y


@HurriedJit
def _current_v(memory: Any, clocks: Clocks) -> PyTree:
    return memory.v.at(clocks.v.now)


class Info(eqx.Module):
    """What a step saw.

    Attributes:
      objective: the mean of f over the sampled blocks and rows; under a risk, its estimate.
      gradient_norm: ‖z‖, the size of the tracked ∇F.
      lower_residual: root mean square of the tracked ∇_y g over the visited slots (0 for mean levels).
      inverse_residual: the same of the tracked ∇²_yy g v − ∇_y f, where v is tracked.
      decomposed: how many tracked Hessians fell below the floor and had to be decomposed.
    """

    objective: Array
    gradient_norm: Array
    lower_residual: Array
    inverse_residual: Array
    decomposed: Array
