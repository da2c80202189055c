"""Variants of BSVRB, as small recipes: each makes one choice that the paper leaves open differently."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import bilevax as bx
from bilevax.solvers.toolkit import (
    Look,
    Memory,
    Point,
    Sample,
    TrackedHessian,
    TrackedSolve,
    Visit,
    flatten_slots,
    hessians,
    project_ball,
    raise_eigenvalues,
    solve,
    step_along,
    track,
    unflatten_slots,
)

PyTree = Any

_EXTRA = 101  # a random stream that nothing else uses


class SampledBSVRBv2(bx.BSVRBv2):
    """BSVRB v2 that moves only the sampled blocks."""

    lazy = False


class EagerSolve(TrackedSolve):
    """Projects v in every step, not once when a block catches up. Needs a constant inverse step."""

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        moving, step, radius = visit.rows.v, visit.rates.inverse_step, visit.rates.radius
        assert moving is not None
        assert moving.stamp is not None
        missed = jnp.round((visit.clocks.v.now - moving.stamp) / step).astype(jnp.int32)

        def one(v: PyTree, moves: Array) -> PyTree:
            amount = jnp.where(moves, step, 0.0)
            return project_ball(step_along(v, amount, moving.slope), radius, visit.slot_axes)

        def pass_over(k: Array, v: PyTree) -> PyTree:
            return one(v, k < missed - 1)

        before = jax.lax.fori_loop(0, jnp.max(missed) - 1, pass_over, moving.value)
        return [one(before, missed > 0), before]


class EagerBSVRBv2(bx.BSVRBv2):
    """BSVRB v2 with the projection as printed in the paper: v ← Π_V[v − τ̄u] for all blocks in every step."""

    curvature = EagerSolve()


class RefreshedHessian(TrackedHessian):
    """Solves with the refreshed H at time t and with the previous H at time t−1; `visits` refreshes H."""

    def directions(self, visit: Visit, by_y: list[PyTree]) -> list[PyTree]:
        matrices = [visit.rows.hessian, visit.rows.previous][: len(by_y)]  # one point before the first step
        solved = [
            solve(matrix, flatten_slots(right)[..., None])[..., 0]
            for matrix, right in zip(matrices, by_y, strict=True)
        ]
        return [unflatten_slots(flat, like) for flat, like in zip(solved, by_y, strict=True)]

    def refresh(self, visit: Visit, look: Look) -> tuple[Memory, Array]:
        rows, _ = super().refresh(visit, look)
        kept = Memory(y=rows.y, hessian=visit.rows.hessian, previous=visit.rows.previous, visit=rows.visit)
        return kept, jnp.zeros((), jnp.int32)


class SameBatchBSVRBv1(bx.BSVRBv1):
    """BSVRB v1 that uses H right after its refresh: H and the Jacobian are estimated on the same rows."""

    extra_batch: ClassVar[bool] = False
    curvature = RefreshedHessian()

    def visits(
        self, problem: bx.Problem, state: bx.State, sample: Sample, stage: Array | int
    ) -> dict[str, Visit]:
        rows = sample
        if self.extra_batch:
            random = state.sampler.random.at(_EXTRA).at(state.step)
            rows = state.sampler.visit(problem, sample.blocks, random, state.sampler.batch_size)
        found = super().visits(problem, state, sample, stage)
        return {name: _refreshed(problem, state, rows, name, visit) for name, visit in found.items()}


class ExtraBatchBSVRBv1(SameBatchBSVRBv1):
    """BSVRB v1 that uses H right after its refresh on separate rows: a third batch per block and step."""

    extra_batch = True


def _refreshed(problem: bx.Problem, state: bx.State, rows: Sample, name: str, visit: Visit) -> Visit:
    recalled = visit.recall(visit.rows.y, visit.clocks.y)
    points = [Point(x, {name: y}) for x, y in zip((state.x, state.x_before), recalled, strict=True)]
    samples: list[Any] = [hessians(problem, name, point, rows) for point in points]
    old = visit.rows.hessian
    hessian, _ = raise_eigenvalues(
        track(old, samples, visit.rates.alpha_bar, visit.rates.gamma_bar), visit.rates.floor
    )
    return eqx.tree_at(lambda v: (v.rows.hessian, v.rows.previous), visit, (hessian, old))
