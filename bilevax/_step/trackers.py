r"""How a level's v ≈ [∇²_yy g]⁻¹ ∇_y f is had, and what is tracked for it.

==================  =========================================================================
`TrackedHessian`    H tracks ∇²_yy g, its eigenvalues kept ≥ λ; v = H⁻¹ ∇_y f
`TrackedSolve`      v itself descends φ(v) = ½ vᵀ∇²_yy g v − vᵀ∇_y f along the tracked u ≈ ∇φ
`Identity`          a mean level, whose Hessian is the identity: v = ∇_y f
==================  =========================================================================

Each is a stateless tracker of one lower level: it recalls the level's slots at times t and t−1, turns
∇_y f into v, and refreshes the slots with the step's samples. Lists hold one entry per point: [now] or
[now, before].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._step.clocks import Clock, Clocks
from bilevax._step.estimators import moving_average, msvr
from bilevax._step.lagrangian import Gradients, Point, hessians
from bilevax._step.linear_algebra import flatten_slots, raise_eigenvalues, run_if, solve, unflatten_slots
from bilevax._step.oracles import Oracles
from bilevax._step.slots import Memory, Moving, project_ball
from bilevax._util.trees import PyTree, combine, where_slot


class Rates(eqx.Module):
    """The coefficients of one level at one step; None where the method or the level has no use for one."""

    alpha: Any
    gamma: Any
    alpha_bar: Any
    gamma_bar: Any
    lower_step: Any
    inverse_step: Any
    radius: Any
    floor: Any


class Visit(eqx.Module):
    """One level's share of a step: its slots' memory, as gathered, and what it needs to be read.

    Attributes:
      rows: the memory of the touched slots.
      step: t.
      corrected: whether the method also looks at time t−1.
      lazy: whether all slots move, caught up when visited; else only the visited ones move.
      slot_axes: how many leading axes of `rows` count slots.
    """

    rows: Memory
    clocks: Clocks
    rates: Rates
    step: Array
    name: str = eqx.field(static=True)
    corrected: bool = eqx.field(static=True)
    lazy: bool = eqx.field(static=True)
    slot_axes: int = eqx.field(static=True)

    @property
    def recent(self) -> Array:
        """Which of the slots were visited in the step before this one."""
        return self.rows.visit == self.step - 1

    @property
    def stamped(self) -> Array | None:
        """The `visit` to store."""
        return None if self.rows.visit is None else jnp.broadcast_to(self.step, self.rows.visit.shape)

    def recall(self, moving: Moving, clock: Clock) -> list[PyTree]:
        """A moving variable at times t and t−1."""
        now = moving.at(clock.now)
        if not self.corrected:
            return [now]
        if self.lazy:
            return [now, moving.at(clock.before)]
        undone = combine((1, moving.value), (clock.now - clock.before, moving.slope))
        return [now, where_slot(self.recent, undone, moving.value)]

    def move(self, value: PyTree, slope: PyTree, clock: Clock, step: Array) -> Moving:
        """What to store of a variable that has this value now and goes along this slope."""
        if self.lazy:
            shape = jax.tree.leaves(value)[0].shape[: self.slot_axes]
            return Moving(value, slope, clock.stamp(shape))
        return Moving(combine((1, value), (-step, slope)), slope, None)


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


def track(tracked: PyTree, samples: list[PyTree], alpha: Array, gamma: Array | None) -> PyTree:
    """MSVR when there are samples at both points, a moving average when there is one."""
    if len(samples) == 1:
        return moving_average(tracked, samples[0], alpha)
    assert gamma is not None
    return msvr(tracked, samples[0], samples[1], alpha, gamma)


class Identity:
    """A mean level: y is tracked directly, and v = ∇_y f."""

    needs_upper_gradient = True
    oracles = Oracles(gradients=1, products=1)

    def recall(self, visit: Visit) -> list[PyTree]:
        rows = visit.rows
        if not visit.corrected:
            return [rows.y]
        return [rows.y, where_slot(visit.recent, rows.previous, rows.y)]

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        return by_y

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, rates = visit.rows, visit.rates
        y = track(rows.y, [one.v[visit.name] for one in look.gradients], rates.alpha, rates.gamma)
        previous = rows.y if visit.corrected else None
        return Memory(y=y, previous=previous, visit=visit.stamped), jnp.zeros((), jnp.int32)


class TrackedSolve:
    """v descends along u, which tracks ∇²_yy g v − ∇_y f; ‖v‖ ≤ radius."""

    needs_upper_gradient = False
    oracles = Oracles(gradients=1, products=2)

    def recall(self, visit: Visit) -> list[PyTree]:
        return visit.recall(visit.rows.y, visit.clocks.y)

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        assert visit.rows.v is not None
        recalled = visit.recall(visit.rows.v, visit.clocks.v)
        return [project_ball(v, visit.rates.radius, visit.slot_axes) for v in recalled]

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, rates = visit.rows, visit.rates
        assert rows.v is not None
        samples = [_minus(one.y[visit.name]) for one in look.gradients]
        u = track(rows.v.slope, samples, rates.alpha_bar, rates.gamma_bar)
        moved = visit.move(look.v[0][visit.name], u, visit.clocks.v, rates.inverse_step)
        if not visit.lazy:
            moved = Moving(project_ball(moved.value, rates.radius, visit.slot_axes), u, None)
        y = _refresh_y(visit, look)
        return Memory(y=y, v=moved, visit=visit.stamped), jnp.zeros((), jnp.int32)


class TrackedHessian:
    """H tracks ∇²_yy g with eigenvalues ≥ floor; v = H⁻¹ ∇_y f with the H from before the refresh."""

    needs_upper_gradient = True
    oracles = Oracles(gradients=1, products=1, matrices=1)

    def recall(self, visit: Visit) -> list[PyTree]:
        return visit.recall(visit.rows.y, visit.clocks.y)

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        hessian = visit.rows.hessian
        assert hessian is not None
        flat = [flatten_slots(one) for one in by_y]
        solved = solve(hessian, jnp.stack(flat, -1))
        if visit.corrected:
            # H at time t−1 is another matrix only where the slot was refreshed in step t−1.
            other = run_if(
                jnp.any(visit.recent),
                lambda: solve(visit.rows.previous, flat[1][..., None])[..., 0],
                flat[1],
            )
            solved = solved.at[..., 1].set(jnp.where(visit.recent[:, None], other, solved[..., 1]))
        return [unflatten_slots(solved[..., place], one) for place, one in enumerate(by_y)]

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, rates = visit.rows, visit.rates
        samples = [hessians(look.problem, visit.name, point, look.sample) for point in look.points]
        tracked = track(rows.hessian, samples, rates.alpha_bar, rates.gamma_bar)
        hessian, repaired = raise_eigenvalues(tracked, rates.floor)
        previous = rows.hessian if visit.corrected else None
        y = _refresh_y(visit, look)
        return Memory(y=y, hessian=hessian, previous=previous, visit=visit.stamped), repaired


Tracker = Identity | TrackedSolve | TrackedHessian


def _refresh_y(visit: Visit, look: Look) -> Moving:
    rates = visit.rates
    samples = [_minus(one.v[visit.name]) for one in look.gradients]
    s = track(visit.rows.y.slope, samples, rates.alpha, rates.gamma)
    return visit.move(look.points[0].y[visit.name], s, visit.clocks.y, rates.lower_step)


def _minus(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.negative, tree)
