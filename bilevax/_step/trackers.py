r"""How a lower level is followed, and where its multiplier v ≈ [∇²_yy g]⁻¹ ∇_y f comes from.

==================  =========================================================================
`TrackedHessian`    H tracks ∇²_yy g, its eigenvalues kept ≥ λ; v = H⁻¹ ∇_y f
`TrackedSolve`      v itself descends φ(v) = ½ vᵀ∇²_yy g v − vᵀ∇_y f along the tracked u ≈ ∇φ
`Identity`          a mean level, whose Hessian is the identity: v = ∇_y f
`Optimised`         a block's own variables, which optimise f: there is no v
==================  =========================================================================

Lists hold one entry per point: [now] or [now, before].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.levels import on_one_side
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._problem.signs import signs
from bilevax._problem.view import each_block
from bilevax._step.clocks import Clock, CompensatedSum
from bilevax._step.estimators import moving_average, msvr
from bilevax._step.lagrangian import Gradients, Point, hessians
from bilevax._step.linear_algebra import (
    flatten_slots,
    free_part,
    raise_eigenvalues,
    run_if,
    solve,
    unflatten_slots,
)
from bilevax._step.lower_transformation import transformed_move
from bilevax._step.oracles import Oracles
from bilevax._step.slots import NEVER, Memory, Moving, project_ball
from bilevax._step.smoothness import scaled
from bilevax._step.visit import Look, Visit
from bilevax._util.trees import PyTree, combine, inner, result_dtype, where_slot, zeros_like


def track(tracked: PyTree, samples: list[PyTree], alpha: Array, gamma: Array | None) -> PyTree:
    """MSVR when there are samples at both points, a moving average when there is one."""
    if len(samples) == 1:
        return moving_average(tracked, samples[0], alpha)
    assert gamma is not None
    return msvr(tracked, samples[0], samples[1], alpha, gamma)


@dataclasses.dataclass(frozen=True)
class Tracker:
    """How one lower level is followed: all that concerns what is stored per slot.

    A tracker is stateless. A step calls `recall`, `directions` and `refresh`, in this order; the start of a
    run calls `check`, `blank`, `prepare`, `directions` and `first`.

    Class attributes:
      needs_upper_gradient: whether `directions` needs ∇_y f.
      multiplier: whether the stored v is the multiplier [∇²_yy g]⁻¹ ∇_y f, which is zero where bounds hold y.
      indefinite: whether it also follows saddle points of g, whose Hessian is not definite.
      sets: what a y that descends may be confined to: nothing, bounds, or any set with a projection.
      coefficients: the coefficients that a step needs, estimated where the user leaves them out.
      transforms: whether y may be moved by an optax transformation, as `Descent.refresh_y` moves it.
      twin: whether the stored v is another lower variable: the same transformation then moves it, unless it
        has a step of its own.
      oracles: what a visit asks of g at one point.
    """

    needs_upper_gradient: ClassVar[bool] = False
    multiplier: ClassVar[bool] = False
    indefinite: ClassVar[bool] = False
    sets: ClassVar[Literal["none", "bounds", "any"]] = "none"
    coefficients: ClassVar[frozenset[str]] = frozenset()
    transforms: ClassVar[bool] = False
    twin: ClassVar[bool] = False
    oracles: ClassVar[Oracles] = Oracles(gradients=1, products=1)

    def check(self, name: str, y: PyTree, slot_shape: tuple[int, ...]) -> None:
        """Raises if a level with these variables and slots per block cannot be tracked."""

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        """The memory of all slots at y, with estimators that know nothing yet."""
        raise NotImplementedError

    def prepare(self, visit: Visit, problem: Problem, point: Point, sample: Sample) -> Visit:
        """Stores the first values that `directions` depends on."""
        return visit

    def first(self, visit: Visit, look: Look) -> Memory:
        """The estimators from the first sample; y does not move."""
        raise NotImplementedError

    def recall(self, visit: Visit) -> list[PyTree]:
        """y of the visited slots, [now] or [now, before]."""
        raise NotImplementedError

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        """v at the same points, from ∇_y f where `needs_upper_gradient` is set."""
        raise NotImplementedError

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        """The memory after this step, and how many tracked matrices had to be repaired."""
        raise NotImplementedError

    def lag(self, visit: Visit, look: Look) -> Array:
        """By how much f would fall if y were y(x), to first order, over the visited slots; 0 if not known."""
        return jnp.zeros(())

    @property
    def a_step_behind(self) -> Tracker:
        """The tracker whose variables move along what was tracked before this step's refresh."""
        return self


class Identity(Tracker):
    """A mean level: y is tracked directly, and v = ∇_y f."""

    needs_upper_gradient = True

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        return Memory(y=y, previous=y if corrected else None, visit=_never(y) if corrected else None)

    def first(self, visit: Visit, look: Look) -> Memory:
        y = look.problem.levels[visit.name].bounded(look.points[0].y[visit.name])
        return Memory(y=y, previous=None if visit.rows.previous is None else y, visit=visit.rows.visit)

    def recall(self, visit: Visit) -> list[PyTree]:
        rows = visit.rows
        if not visit.corrected:
            return [rows.y]
        return [rows.y, where_slot(visit.recent, rows.previous, rows.y)]

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        return by_y

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, rates = visit.rows, visit.rates
        samples = [one.v[visit.name] for one in look.gradients]
        y = track(rows.y, samples, rates.alpha, rates.gamma)
        level = look.problem.levels[visit.name]
        if visit.corrected and not level.is_bounded:
            y = on_one_side(y, [rows.y, *samples], _signs(look, visit.name))
        y = level.bounded(y)
        previous = rows.y if visit.corrected else None
        return Memory(y=y, previous=previous, visit=visit.stamped), jnp.zeros((), jnp.int32)

    def lag(self, visit: Visit, look: Look) -> Array:
        """⟨∇_y f, y − c⟩."""
        name, seen = visit.name, look.gradients[0]
        return inner(look.weighed(look.v[0][name]), combine((1, look.points[0].y[name]), (-1, seen.v[name])))


@dataclasses.dataclass(frozen=True)
class Descent(Tracker):
    """y descends along s, which tracks ∇_y g. The trackers below add v.

    A y with bounds is projected onto them: after its step, or when it is caught up, once after the sum of
    its steps. A subclass that says so in `sets` sees to it that v is zero where they hold y.

    Attributes:
      refreshed: whether a visited slot moves along the s (and u) that this step refreshed, or along those
        from before.
    """

    coefficients = frozenset({"lower_step"})
    transforms = True

    refreshed: bool = True

    @property
    def a_step_behind(self) -> Tracker:
        return dataclasses.replace(self, refreshed=False)

    def resting(self, value: PyTree, lazy: bool) -> Moving:
        """A variable that does not move yet."""
        slots, dtype = jax.tree.leaves(value)[0].shape[0], result_dtype(value)
        stamp = CompensatedSum(jnp.zeros((slots,), dtype), jnp.zeros((slots,), dtype)) if lazy else None
        return Moving(value, zeros_like(value), stamp, None if self.refreshed else zeros_like(value))

    def moved(
        self, visit: Visit, old: Moving, value: PyTree, slope: PyTree, clock: Clock, step: Any
    ) -> Moving:
        """What to store of a variable that has this value now and whose slope was refreshed."""
        if old.optimizer is not None:
            return transformed_move(visit, old, value, slope, self.refreshed, step)
        return visit.move(value, slope, clock, step, None if self.refreshed else old.slope)

    def recall(self, visit: Visit) -> list[PyTree]:
        recalled = visit.recall(visit.rows.y, visit.clocks.y)
        return [visit.bounded(y) for y in recalled] if visit.lazy else recalled

    def lower_gradient(self, seen: Gradients, visit: Visit) -> PyTree:
        """The sample of the gradient that y descends along: −∂ℓ/∂v."""
        return _minus(seen.v[visit.name])

    def refresh_y(self, visit: Visit, look: Look) -> Moving:
        """y and s after this step."""
        rates, samples = visit.rates, [self._scaled_lower(one, visit) for one in look.gradients]
        s = track(visit.rows.y.slope, samples, rates.alpha, rates.gamma)
        y = look.points[0].y[visit.name]
        moved = self.moved(visit, visit.rows.y, y, s, visit.clocks.y, rates.lower_step)
        return moved if visit.lazy else dataclasses.replace(moved, value=visit.bounded(moved.value))

    def lag(self, visit: Visit, look: Look) -> Array:
        """⟨∇_y f, [∇²_yy g]⁻¹ ∇_y g⟩ = ⟨v, ∇_y g⟩."""
        return inner(
            look.weighed(self.multipliers(visit, look)), self.lower_gradient(look.gradients[0], visit)
        )

    def multipliers(self, visit: Visit, look: Look) -> PyTree:
        """v of the visited slots."""
        return look.v[0][visit.name]

    def _scaled_lower(self, seen: Gradients, visit: Visit) -> PyTree:
        return scaled(visit.signed(self.lower_gradient(seen, visit)), visit.rates.lower_scales)

    def first_y(self, visit: Visit, look: Look) -> Moving:
        """y where it starts, and s from the first sample."""
        slope = self._scaled_lower(look.gradients[0], visit)
        return dataclasses.replace(visit.rows.y, value=look.points[0].y[visit.name], slope=slope)


class Optimised(Descent):
    """A block's own variables: y descends along s, which tracks ∂ℓ/∂y (−∂ℓ/∂y, if y maximises f)."""

    oracles = Oracles()  # the gradient of f by y is counted with f
    sets = "any"

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        looks_back = corrected and not lazy
        previous, visit = (y, _never(y)) if looks_back else (None, None)
        return Memory(y=self.resting(y, lazy), previous=previous, visit=visit)

    def first(self, visit: Visit, look: Look) -> Memory:
        rows, y = visit.rows, self.first_y(visit, look)
        return Memory(y=y, previous=None if rows.previous is None else y.value, visit=rows.visit)

    def recall(self, visit: Visit) -> list[PyTree]:
        rows = visit.rows
        if visit.corrected and not visit.lazy:  # a step that was projected cannot be undone
            return [rows.y.value, where_slot(visit.recent, rows.previous, rows.y.value)]
        return super().recall(visit)

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        return [None for _ in by_y]

    def lower_gradient(self, seen: Gradients, visit: Visit) -> PyTree:
        """The sample of the gradient of what y optimises: ∂ℓ/∂y."""
        return seen.y[visit.name]

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        previous = None if visit.rows.previous is None else look.points[0].y[visit.name]
        return Memory(y=self.refresh_y(visit, look), previous=previous, visit=visit.stamped), jnp.zeros(
            (), jnp.int32
        )

    def lag(self, visit: Visit, look: Look) -> Array:
        """0: to first order, f does not change with y where y is optimal."""
        return jnp.zeros(())


class TrackedSolve(Descent):
    """v descends along u, which tracks ∇²_yy g v − ∇_y f, on the free entries of y; ‖v‖ ≤ radius.

    At a saddle point of g, the entries of u that belong to what maximises g are negated, as those of s are.
    """

    multiplier = True
    indefinite = True
    sets = "bounds"
    coefficients = frozenset({"lower_step", "inverse_step"})
    oracles = Oracles(gradients=1, products=2)

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        visit = _never(y) if corrected and not lazy else None
        return Memory(y=self.resting(y, lazy), v=self.resting(self.first_v(y), lazy), visit=visit)

    def first_v(self, y: PyTree) -> PyTree:
        """Where v starts."""
        return zeros_like(y)

    def solve_gradient(self, seen: Gradients, visit: Visit) -> PyTree:
        """The sample of the gradient that v descends along: −∂ℓ/∂y."""
        return _minus(seen.y[visit.name])

    def confined(self, visit: Visit, v: PyTree, y: PyTree) -> PyTree:
        """v where it may be: zero where bounds hold y; in the set of y, if it is no multiplier."""
        inside = visit.on_free(v, y) if self.multiplier else visit.bounded(v)
        return project_ball(inside, visit.rates.radius, visit.slot_axes)

    def _scaled_solve(self, seen: Gradients, visit: Visit, y: PyTree) -> PyTree:
        slope = self.solve_gradient(seen, visit)
        slope = visit.on_free(slope, y) if self.multiplier else slope
        return scaled(visit.signed(slope), visit.rates.inverse_scales)

    def first(self, visit: Visit, look: Look) -> Memory:
        assert visit.rows.v is not None
        u = self._scaled_solve(look.gradients[0], visit, look.points[0].y[visit.name])
        v = dataclasses.replace(visit.rows.v, slope=u)
        return Memory(y=self.first_y(visit, look), v=v, visit=visit.rows.visit)

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        assert visit.rows.v is not None
        recalled = visit.recall(visit.rows.v, visit.clocks.v)
        # The y of the same points, which says where v is zero.
        ys = self.recall(visit) if visit.confined else recalled
        return [self.confined(visit, v, y) for v, y in zip(recalled, ys, strict=True)]

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, rates = visit.rows, visit.rates
        assert rows.v is not None
        samples = [
            self._scaled_solve(one, visit, point.y[visit.name])
            for one, point in zip(look.gradients, look.points, strict=True)
        ]
        u = track(rows.v.slope, samples, rates.alpha_bar, rates.gamma_bar)
        moved = self.moved(visit, rows.v, look.v[0][visit.name], u, visit.clocks.v, rates.inverse_step)
        y = self.refresh_y(visit, look)
        if not visit.lazy:
            moved = dataclasses.replace(moved, value=self.confined(visit, moved.value, y.value))
        return Memory(y=y, v=moved, visit=visit.stamped), jnp.zeros((), jnp.int32)


class TrackedHessian(Descent):
    """H tracks ∇²_yy g with eigenvalues ≥ floor; v = H⁻¹ ∇_y f with the H from before the refresh."""

    needs_upper_gradient = True
    sets = "bounds"
    coefficients = frozenset({"lower_step", "floor"})
    oracles = Oracles(gradients=1, products=1, matrices=1)

    def check(self, name: str, y: PyTree, slot_shape: tuple[int, ...]) -> None:
        check_hessian(name, y, slot_shape)

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        hessian = scaled_identities(y, smoothness)
        previous, visit = (hessian, _never(y)) if corrected else (None, None)
        return Memory(y=self.resting(y, lazy), hessian=hessian, previous=previous, visit=visit)

    def prepare(self, visit: Visit, problem: Problem, point: Point, sample: Sample) -> Visit:
        sampled = hessians(problem, visit.name, point, sample)
        hessian, _ = raise_eigenvalues(sampled, visit.rates.floor)
        return dataclasses.replace(visit, rows=dataclasses.replace(visit.rows, hessian=hessian))

    def first(self, visit: Visit, look: Look) -> Memory:
        rows, hessian = visit.rows, visit.rows.hessian
        previous = None if rows.previous is None else hessian
        return Memory(y=self.first_y(visit, look), hessian=hessian, previous=previous, visit=rows.visit)

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        hessian = visit.rows.hessian
        assert hessian is not None
        if visit.confined:
            return self._on_free_entries(visit, by_y)
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

    def _on_free_entries(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        """v where bounds hold entries of y: H of the others alone, at each of the points."""
        hessian, out = visit.rows.hessian, []
        assert hessian is not None
        for place, (one, y) in enumerate(zip(by_y, self.recall(visit), strict=True)):
            if place == 1:
                hessian = jnp.where(visit.recent[:, None, None], visit.rows.previous, hessian)
            free = flatten_slots(visit.on_free(jax.tree.map(jnp.ones_like, y), y))
            right = (free * flatten_slots(one))[..., None]
            out.append(unflatten_slots(solve(free_part(hessian, free), right)[..., 0], one))
        return out

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, rates = visit.rows, visit.rates
        samples = [hessians(look.problem, visit.name, point, look.sample) for point in look.points]
        tracked = track(rows.hessian, samples, rates.alpha_bar, rates.gamma_bar)
        hessian, repaired = raise_eigenvalues(tracked, rates.floor)
        previous = rows.hessian if visit.corrected else None
        y = self.refresh_y(visit, look)
        return Memory(y=y, hessian=hessian, previous=previous, visit=visit.stamped), repaired


def check_hessian(name: str, y: PyTree, slot_shape: tuple[int, ...]) -> None:
    """Raises if the Hessians of a level cannot be tracked."""
    if slot_shape != ():
        raise ValueError(
            f"a tracked Hessian needs one slot per block, got slots of shape {slot_shape} for the lower "
            f"level {name!r}: use BSVRBv2, which tracks no Hessian"
        )
    check_factorable(name, y)


def scaled_identities(y: PyTree, smoothness: Any) -> Array:
    """What tracked Hessians begin as: L_g times the identity, per slot."""
    slots, dtype = jax.tree.leaves(y)[0].shape[0], result_dtype(y)
    size = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(y))
    scaled = smoothness * jnp.eye(size, dtype=dtype)
    return jnp.broadcast_to(scaled, (slots, size, size)).astype(dtype)


def check_factorable(name: str, y: PyTree) -> None:
    """Raises if the Hessians of a level cannot be factorised in the dtype of its variables."""
    for leaf in jax.tree.leaves(y):
        if leaf.dtype.itemsize < 4:
            raise TypeError(
                f"y0 of the lower level {name!r} must be float32 or float64 for a method that factorises "
                f"Hessians, got {leaf.dtype}: use BSVRBv2"
            )


def _signs(look: Look, name: str) -> PyTree:
    """On which side of zero the c of a mean level always is, by leaf."""

    def c(x: PyTree, sample: Sample, others: PyTree) -> PyTree:
        return each_block(look.problem, x, sample, lambda view, others: view.c(name, others), others)

    point = look.points[0]
    return signs(c, point.x, look.sample, look.problem.read_by(name, point.y))


def _never(y: PyTree) -> Array:
    """The last visit of slots that were never visited."""
    return jnp.full((jax.tree.leaves(y)[0].shape[0],), NEVER, jnp.int32)


def _minus(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.negative, tree)
