"""The state before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import START, Sample, Sampler
from bilevax._step.clocks import Clock, Clocks, CompensatedSum
from bilevax._step.lagrangian import Point, gradients, hessians, upper_gradients
from bilevax._step.linear_algebra import flatten_slots, raise_eigenvalues, solve, unflatten_slots
from bilevax._step.passes import over_all_blocks
from bilevax._step.slot_table import SlotTable, pack
from bilevax._step.slots import Memory, Moving
from bilevax._step.smoothness import estimate_floor, estimate_smoothness
from bilevax._step.state import State
from bilevax._step.trackers import Identity, TrackedHessian, TrackedSolve
from bilevax._util.trees import PyTree, combine, result_dtype, zeros_like
from bilevax.solvers.inputs import check_coefficients, check_factorable, check_hessian_slots, checked_start
from bilevax.solvers.upper import way_back

NEVER = -2  # a last visit that no step's predecessor equals


def start_state(
    recipe: Any,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    sampler: Sampler,
    initial_batch_size: Any,
) -> State:
    """The state of a recipe before its first step; see `Recipe.init`."""
    rows = recipe.first_rows(initial_batch_size, sampler.batch_size)
    trackers = recipe.trackers(problem)
    check_coefficients(recipe, problem, sampler)
    x, y, estimated = checked_start(problem, x0, y0, sampler)
    check_hessian_slots(trackers, problem, sampler)
    for name, tracker in trackers.items():
        if isinstance(tracker, TrackedHessian):
            check_factorable(name, y[name])
    missing = {n: recipe.missing(n) for n, t in trackers.items() if not isinstance(t, Identity)}
    probed = rows == 0 or any(missing.values())
    smoothness = estimate_smoothness(problem, x, y, sampler) if probed else {}
    floors = {
        n: estimate_floor(problem, n, x, y, sampler, smoothness[n]) for n in missing if "floor" in missing[n]
    }
    clocks = {n: Clocks(Clock.start(result_dtype(y[n])), Clock.start(result_dtype(y[n]))) for n in trackers}
    levels = {
        n: pack(_blank(t, y[n], recipe.corrected, recipe.lazy, smoothness.get(n, 1.0)))
        for n, t in trackers.items()
    }
    optimizer = (
        recipe.upper_step.init(x) if isinstance(recipe.upper_step, optax.GradientTransformation) else None
    )
    back = way_back(recipe.upper_step, 0.0, x) if recipe.corrected else None
    step = jnp.zeros((), jnp.int32)
    state = State(
        step, x, zeros_like(x), back, optimizer, levels, clocks, smoothness, floors, sampler, problem.named
    )
    return state if rows == 0 else _first_pass(recipe, problem, state, estimated, rows)


def _blank(tracker: Any, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
    """The memory of a level whose estimators are all zero (a tracked Hessian: L_g times the identity)."""
    slots = jax.tree.leaves(y)[0].shape[0]
    dtype = result_dtype(y)
    visit = jnp.full((slots,), NEVER, jnp.int32) if corrected else None

    def resting(value: PyTree) -> Moving:
        stamp = CompensatedSum(jnp.zeros((slots,), dtype), jnp.zeros((slots,), dtype)) if lazy else None
        return Moving(value, zeros_like(value), stamp)

    if isinstance(tracker, Identity):
        return Memory(y=y, previous=y if corrected else None, visit=visit)
    if isinstance(tracker, TrackedSolve):
        return Memory(y=resting(y), v=resting(zeros_like(y)), visit=None if lazy else visit)
    size = sum(int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(y))
    hessian = jnp.broadcast_to(smoothness * jnp.eye(size, dtype=dtype), (slots, size, size)).astype(dtype)
    return Memory(y=resting(y), hessian=hessian, previous=hessian if corrected else None, visit=visit)


def _first_pass(
    recipe: Any, problem: Problem, state: State, estimated: frozenset[str], batch_size: int | None
) -> State:
    """The estimators of all slots, and z, from one batch per block at (x0, y0)."""
    sampler, size = state.sampler, state.sampler.stratum_size

    def look(stratum: Any, number: Any, places: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        levels, total = carry
        random = sampler.stream(sampler.random.at(START).at(number), stratum)
        sample = sampler.visit(problem, stratum * size + places, random, batch_size)
        rows, z = _first_look(recipe, problem, state, levels, sample, estimated)
        levels = {n: levels[n].put(sample.slots[n], rows[n], problem.levels[n].slots is None) for n in levels}
        return levels, combine((1, total), (places.shape[0] / problem.count, z))

    def of_stratum(stratum: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return over_all_blocks(size, lambda *given: look(stratum, *given), carry)

    strata, carry = sampler.strata or 1, (state.levels, state.z)
    levels, z = of_stratum(0, carry) if strata == 1 else jax.lax.fori_loop(0, strata, of_stratum, carry)
    return dataclasses.replace(state, levels=levels, z=sampler.mean(z))


def _first_look(
    recipe: Any,
    problem: Problem,
    state: State,
    levels: dict[str, SlotTable],
    sample: Sample,
    estimated: frozenset[str],
) -> tuple[dict[str, Memory], PyTree]:
    trackers = recipe.trackers(problem)
    rows = {name: levels[name].take(sample.slots[name]) for name in levels}
    y = {name: row.y.value if isinstance(row.y, Moving) else row.y for name, row in rows.items()}
    lower = gradients(problem, Point(state.x, y), zeros_like(y), sample).v
    y = {name: lower[name] if name in estimated else y[name] for name in y}
    point = Point(state.x, y)
    by_y = upper_gradients(problem, point, sample)
    hessian, v = {}, {}
    for name, tracker in trackers.items():
        if isinstance(tracker, TrackedHessian):
            floor = recipe.rates(problem, state, name, sample.slots[name].size, 0).floor
            hessian[name] = raise_eigenvalues(hessians(problem, name, point, sample), floor)[0]
            solved = solve(hessian[name], flatten_slots(by_y[name])[..., None])[..., 0]
            v[name] = unflatten_slots(solved, by_y[name])
        else:
            v[name] = zeros_like(y[name]) if isinstance(tracker, TrackedSolve) else by_y[name]
    seen = gradients(problem, point, v, sample)
    out = {}
    for name, tracker in trackers.items():
        row = rows[name]
        if isinstance(tracker, Identity):
            out[name] = Memory(y=y[name], previous=y[name] if recipe.corrected else None, visit=row.visit)
            continue
        moving = Moving(y[name], combine((-1, lower[name])), row.y.stamp)
        if isinstance(tracker, TrackedSolve):
            assert row.v is not None
            u = combine((-1, seen.y[name]))
            out[name] = Memory(y=moving, v=Moving(row.v.value, u, row.v.stamp), visit=row.visit)
        else:
            kept = hessian[name] if recipe.corrected else None
            out[name] = Memory(y=moving, hessian=hessian[name], previous=kept, visit=row.visit)
    return out, seen.x
