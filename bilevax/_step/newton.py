r"""Newton steps on a lower level, averaged over its visits.

With the weight c of a new batch, the Hessian h and the gradient ∇_y g of that batch,

.. math::
    H \leftarrow (1-c) H + c\,h, \qquad
    y \leftarrow y - c\,H^{-1} \nabla_y g, \qquad
    v \leftarrow v - c\,H^{-1} (h v - \nabla_y f)

If g is quadratic and x stands still, y is the exact minimiser of the weighted mean of all batches seen so far
(recursive least squares). As H contains c h, the step is stable on its own batch, however the curvature has
changed. It depends on no units, and on no condition number. The limit of v does not depend on H: it solves
the mean of the equations h v = ∇_y f. (H⁻¹ ∇_y f would be biased, because H is noisy and follows x late.)

If g is far from quadratic, as an exponential is, a Newton step may end far beyond the minimiser. So ∇_y g is
looked at once more, at the end of the step and on the same batch: where g rises there half as steeply as it
fell at the beginning, or more, the step is shortened to where the line through both slopes is zero, and H
takes the curvature of that line along the step. (On a quadratic g that never happens.) Without the latter,
a loss that grows like |y| far from its minimum, where its Hessian vanishes, would send y farther at every
visit.

If g is not convex, negative eigenvalues of H change their sign, so that a step is as long as the curvature
allows, and goes downhill; small ones are raised. What is added to H counts as part of h, in the rule of v
too: otherwise v would grow by large factors along the directions in which h is negative.

Within bounds, y moves to the minimum of c ⟨∇_y g, d⟩ + ½ ⟨d, H d⟩ over the steps d that stay in them, which
is −c H⁻¹ ∇_y g where no bound is met (`_step_within`). v lives on the entries that no bound holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.bounds import Box
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._step.lagrangian import Point, hessians, lower_slopes
from bilevax._step.linear_algebra import (
    change_if,
    flatten_slots,
    free_part,
    raise_eigenvalues,
    run_if,
    solve,
    solve_indefinite,
    unflatten_slots,
)
from bilevax._step.oracles import Oracles
from bilevax._step.slots import Memory, Moving
from bilevax._step.trackers import TrackedSolve, check_hessian, scaled_identities, track
from bilevax._step.visit import Look, Visit
from bilevax._util.trees import PyTree

_LEAST = 1e-3  # the least eigenvalue of H, scaled to a diagonal of ones
_SHORTEST = 1e-3  # of a Newton step
_BEYOND = (
    0.5  # of the slope at the beginning, which the opposite slope at the end shows a step to be too long
)
_GUESSES = 12  # of which bounds a step meets, at most


class NewtonSteps(TrackedSolve):
    """H averages ∇²_yy g; y and v both take Newton steps with it."""

    coefficients = frozenset()
    oracles = Oracles(gradients=2, products=2, matrices=1)

    def check(self, name: str, y: PyTree, slot_shape: tuple[int, ...]) -> None:
        check_hessian(name, y, slot_shape)

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        memory = super().blank(y, corrected, lazy, smoothness)
        return dataclasses.replace(memory, hessian=scaled_identities(y, smoothness))

    def prepare(self, visit: Visit, problem: Problem, point: Point, sample: Sample) -> Visit:
        sampled = hessians(problem, visit.name, point, sample)
        scales = _scales(sampled)
        curved, _ = _definite(_scaled(sampled, 1 / scales), 100 * _LEAST, _signs(visit))
        rows = dataclasses.replace(visit.rows, hessian=_scaled(curved, scales))
        return dataclasses.replace(visit, rows=rows)

    def first(self, visit: Visit, look: Look) -> Memory:
        return dataclasses.replace(super().first(visit, look), hessian=visit.rows.hessian)

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        (point,), (v,), (seen,) = look.points, look.v, look.gradients
        weight = visit.rates.alpha
        sampled = hessians(look.problem, visit.name, point, look.sample)
        signs = _signs(visit)
        tracked = track(visit.rows.hessian, [sampled], weight, None)
        scales = _scales(tracked)
        curved, repaired = _definite(_scaled(tracked, 1 / scales), _LEAST, signs)
        hessian = _scaled(curved, scales)
        slopes = self.lower_gradient(seen, visit), self.solve_gradient(seen, visit)
        values = point.y[visit.name], v[visit.name]
        flat_v = flatten_slots(v[visit.name])
        raised = run_if(
            repaired > 0,
            lambda: ((hessian - tracked) @ flat_v[..., None])[..., 0] / weight,
            jnp.zeros_like(flat_v),
        )
        right = jnp.stack([flatten_slots(slopes[0]), flatten_slots(slopes[1]) + raised], -1)
        right = right / scales[..., None]
        inverse = solve if signs is None else solve_indefinite
        if visit.confined:
            return self._within(visit, look, hessian, (scales, curved, weight * right)), repaired
        steps = weight * inverse(curved, right) / scales[..., None]
        y, v = (
            unflatten_slots(flatten_slots(value) - steps[..., place], value)
            for place, value in enumerate(values)
        )
        if signs is None:
            end = Point(point.x, {**point.y, visit.name: y})
            there = lower_slopes(look.problem, visit.name, end, look.sample)
            share, hessian = _shortened(
                flatten_slots(slopes[0]), flatten_slots(there), steps[..., 0], hessian
            )
            y = unflatten_slots(flatten_slots(values[0]) - share * steps[..., 0], values[0])
        return Memory(y=Moving(y, slopes[0], None), v=Moving(v, slopes[1], None), hessian=hessian), repaired

    def _within(self, visit: Visit, look: Look, hessian: Array, system: tuple[Array, Array, Array]) -> Memory:
        """The memory after a step within bounds, from H and the slopes in units of which H has ones."""
        (point,), (v,), (seen,) = look.points, look.v, look.gradients
        assert visit.level is not None
        assert isinstance(visit.level.domain, Box)
        scales, curved, right = system
        y, domain = point.y[visit.name], visit.level.domain
        slopes = self.lower_gradient(seen, visit), visit.on_free(self.solve_gradient(seen, visit), y)
        flat, (low, high) = flatten_slots(y), map(flatten_slots, domain.ends(y))
        met, step = _step_within((low - flat) * scales, (high - flat) * scales, curved, right[..., 0])
        # Rounding must not leave an entry beside the bound that it has met.
        there = jnp.where(met < 0, low, jnp.where(met > 0, high, jnp.clip(flat + step / scales, low, high)))
        end = Point(point.x, {**point.y, visit.name: unflatten_slots(there, y)})
        there_slopes = lower_slopes(look.problem, visit.name, end, look.sample)
        share, hessian = _shortened(
            flatten_slots(slopes[0]), flatten_slots(there_slopes), flat - there, hessian
        )
        there = unflatten_slots(jnp.where(share == 1, there, flat - share * (flat - there)), y)
        free = flatten_slots(visit.on_free(jax.tree.map(jnp.ones_like, y), y))
        of_v = solve(free_part(curved, free), free[..., None] * right[..., 1:])[..., 0] / scales
        v = unflatten_slots(flatten_slots(v[visit.name]) - of_v, v[visit.name])
        return Memory(
            y=Moving(there, slopes[0], None),
            v=Moving(visit.on_free(v, there), slopes[1], None),
            hessian=hessian,
        )


def _step_within(low: Array, high: Array, curved: Array, right: Array) -> tuple[Array, Array]:
    """The d between two bounds that minimises ⟨right, d⟩ + ½ ⟨d, curved d⟩, and which bounds it meets.

    A guess of which entries end on a bound gives d on the others, and that the next guess: an entry is on a
    bound if d and the slope there push it over that bound. A guess that is made twice is right. Few are
    enough unless they go in circles; then d is cut off at the bounds.
    """

    def guess(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        count, _, before, d = carry
        pushed = d - right - (curved @ d[..., None])[..., 0]
        met = jnp.where(pushed <= low, -1, jnp.where(pushed >= high, 1, 0)).astype(jnp.int32)
        fixed = jnp.where(met < 0, low, jnp.where(met > 0, high, 0))
        free = (met == 0).astype(d.dtype)
        moved = -free * (right + (curved @ fixed[..., None])[..., 0])
        d = fixed + solve(free_part(curved, free), moved[..., None])[..., 0]
        return count + 1, jnp.any(met != before), met, d

    unknown = jnp.full(right.shape, 2, jnp.int32)
    first = jnp.zeros((), jnp.int32), jnp.ones((), bool), unknown, jnp.zeros_like(right)
    return jax.lax.while_loop(lambda carry: carry[1] & (carry[0] < _GUESSES), guess, first)[2:]


def _shortened(here: Array, there: Array, step: Array, hessian: Array) -> tuple[Array, Array]:
    """How much of a step to take, from the slopes at its two ends, and H with the curvature between them.

    A slope at the end that is far larger than the first one says little about the curvature before: H is
    raised as if both were alike.
    """
    falls = jnp.sum(here * step, -1, keepdims=True)
    rises = -jnp.sum(there * step, -1, keepdims=True)
    beyond = rises > _BEYOND * falls
    share = jnp.where(beyond, falls / jnp.where(rises > 0, rises + falls, 1), 1)
    share = jnp.where(jnp.isfinite(rises), jnp.maximum(share, _SHORTEST), _SHORTEST).astype(step.dtype)

    def stiffer(hessian: Array) -> Array:
        along = (hessian @ step[..., None])[..., 0]
        curved = jnp.sum(along * step, -1, keepdims=True)
        known = beyond & (falls > 0) & (curved > 0)
        missing = jnp.where(known, jnp.maximum(2 * falls / jnp.where(known, curved, 1) - 1, 0), 0)
        unit = along * jax.lax.rsqrt(jnp.where(known, curved, 1))
        return hessian + missing[..., None] * unit[..., :, None] * unit[..., None, :]

    return share, change_if(jnp.any(beyond), stiffer, hessian)


def _signs(visit: Visit) -> Array | None:
    """By entry of a slot's y, −1 if it maximises g and 1 if it minimises g; None if all minimise."""
    if visit.level is None or visit.level.sign == 1:
        return None
    return flatten_slots(visit.level.signed(jax.tree.map(jnp.ones_like, visit.rows.y.value)))[0]


def _definite(hessian: Array, least: float, signs: Array | None) -> tuple[Array, Array]:
    """The matrices, with positive curvature in what minimises g, and negative curvature in what maximises it.

    Then they have an inverse, whatever couples both parts. Their diagonals must have been scaled to ones:
    otherwise entries of y in small units would be lost beside those in large ones.
    """
    if signs is None:
        return raise_eigenvalues(hessian, least, reflected=True)
    curved = jnp.where(signs[:, None] == signs, signs * hessian, 0)
    raised, count = raise_eigenvalues(curved, least, reflected=True)
    return hessian + signs * (raised - curved), count


def _scales(hessian: Array) -> Array:
    """The roots of the diagonal by size; where it is zero, that of its largest entry, or one."""
    diagonal = jnp.abs(jnp.diagonal(hessian, axis1=-2, axis2=-1))
    largest, tiny = jnp.max(diagonal, axis=-1, keepdims=True), jnp.finfo(hessian.dtype).tiny
    return jnp.sqrt(jnp.where(diagonal > tiny, diagonal, jnp.where(largest > tiny, largest, 1)))


def _scaled(matrices: Array, scales: Array) -> Array:
    return scales[..., :, None] * matrices * scales[..., None, :]
