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
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sample
from bilevax._step.lagrangian import Point, hessians
from bilevax._step.linear_algebra import flatten_slots, raise_eigenvalues, solve, unflatten_slots
from bilevax._step.oracles import Oracles
from bilevax._step.slots import Memory, Moving
from bilevax._step.trackers import TrackedSolve, check_hessian, scaled_identities, track
from bilevax._step.visit import Look, Visit
from bilevax._util.trees import PyTree

_LEAST = 1e-3  # the least eigenvalue of H, scaled to a diagonal of ones
_NOTHING = 1e-20  # of the largest diagonal entry: less is no curvature at all


class NewtonSteps(TrackedSolve):
    """H averages ∇²_yy g; y and v both take Newton steps with it."""

    coefficients = frozenset()
    oracles = Oracles(gradients=1, products=2, matrices=1)

    def check(self, name: str, y: PyTree, slot_shape: tuple[int, ...]) -> None:
        check_hessian(name, y, slot_shape)

    def blank(self, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
        memory = super().blank(y, corrected, lazy, smoothness)
        return dataclasses.replace(memory, hessian=scaled_identities(y, smoothness))

    def prepare(self, visit: Visit, problem: Problem, point: Point, sample: Sample) -> Visit:
        hessian, _ = _positive(hessians(problem, visit.name, point, sample), 100 * _LEAST)
        return dataclasses.replace(visit, rows=dataclasses.replace(visit.rows, hessian=hessian))

    def first(self, visit: Visit, look: Look) -> Memory:
        return dataclasses.replace(super().first(visit, look), hessian=visit.rows.hessian)

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        (point,), (v,), (seen,) = look.points, look.v, look.gradients
        weight = visit.rates.alpha
        sampled = hessians(look.problem, visit.name, point, look.sample)
        hessian, repaired = _positive(track(visit.rows.hessian, [sampled], weight, None), _LEAST)
        slopes = self.lower_gradient(seen, visit), self.solve_gradient(seen, visit)
        values = point.y[visit.name], v[visit.name]
        scales = _scales(hessian)
        right = jnp.stack([flatten_slots(slope) for slope in slopes], -1) / scales[..., None]
        steps = solve(_scaled(hessian, 1 / scales), right) / scales[..., None]
        y, v = (
            Moving(unflatten_slots(flatten_slots(value) - weight * steps[..., place], value), slope, None)
            for place, (value, slope) in enumerate(zip(values, slopes, strict=True))
        )
        return Memory(y=y, v=v, hessian=hessian), repaired


def _positive(hessian: Array, least: float) -> tuple[Array, Array]:
    """The matrices, with eigenvalues at least so large after every diagonal entry has been scaled to one.

    Without that scaling, entries of y in small units would be lost beside those in large ones.
    """
    scales = _scales(hessian)
    raised, count = raise_eigenvalues(_scaled(hessian, 1 / scales), least)
    return _scaled(raised, scales), count


def _scales(hessian: Array) -> Array:
    """The roots of the diagonal, with a floor where that is not positive."""
    diagonal = jnp.abs(jnp.diagonal(hessian, axis1=-2, axis2=-1))
    largest = jnp.max(diagonal, axis=-1, keepdims=True)
    tiny = jnp.finfo(hessian.dtype).tiny
    return jnp.sqrt(jnp.maximum(diagonal, jnp.maximum(_NOTHING * largest, tiny)))


def _scaled(matrices: Array, scales: Array) -> Array:
    return scales[..., :, None] * matrices * scales[..., None, :]
