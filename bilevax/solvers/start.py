"""The state of a recipe before its first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.lookups import part_of, without_parts
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import START, Sample, Sampler, is_streamed
from bilevax._problem.view import each_block, with_means
from bilevax._step.block_values import first_values
from bilevax._step.clocks import Clock, Clocks
from bilevax._step.coefficients import FIRST_STEP, evaluate
from bilevax._step.lagrangian import Point, gradients
from bilevax._step.lazy_tables import LazyTables
from bilevax._step.lower_transformation import with_transformation
from bilevax._step.passes import over_all_blocks
from bilevax._step.slot_table import SlotTable, pack
from bilevax._step.slots import Memory, gather
from bilevax._step.smoothness import Smoothness, estimate_floor, estimate_smoothness
from bilevax._step.state import Along, Restraint, State
from bilevax._step.visit import Visit
from bilevax._util.per_entry import PerEntry
from bilevax._util.trees import PyTree, combine, result_dtype, zeros_like
from bilevax.solvers.start_checks import checked_start, padded_levels, slot_shape
from bilevax.solvers.upper import row_rule, upper_start, way_back

if TYPE_CHECKING:
    from bilevax.solvers.recipe import Recipe


def start_state(recipe: Recipe, problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler) -> State:
    """The state of a recipe before its first step; see `AbstractSolver.init`."""
    rows, trackers = recipe.first_rows(sampler), recipe.trackers(problem)
    x, y, estimated = checked_start(problem, x0, y0, sampler)
    if is_streamed(problem):
        y = _with_means_of_step_0(problem, x, y, sampler, estimated)
    for name, tracker in trackers.items():
        tracker.check(name, y[name], slot_shape(problem, sampler, name))
    missing = {name: recipe.missing(name, tracker) for name, tracker in trackers.items()}
    looked = [n for n, level in problem.levels.items() if not level.is_value and (missing[n] or rows == 0)]
    smoothness = {
        n: estimate_smoothness(problem, n, x, y, sampler, recipe.leaves_out("inverse_step", n), estimated)
        for n in looked
    }
    floors = {
        n: estimate_floor(problem, n, x, y, sampler, smoothness[n].bound, estimated)
        for n in looked
        if "floor" in missing[n]
    }
    clocks = {n: Clocks(Clock.start(result_dtype(y[n])), Clock.start(result_dtype(y[n]))) for n in trackers}
    levels = {}
    for n, tracker in trackers.items():
        memory = tracker.blank(
            y[n], recipe.corrected, recipe.lazy, smoothness[n].bound if n in looked else 1.0
        )
        transformation = recipe.transformation(n, tracker)
        if transformation is not None:
            twin = tracker.twin and recipe.leaves_out("inverse_step", n)
            memory = with_transformation(memory, transformation, n, recipe.corrected, twin)
        levels[n] = pack(memory)
    if problem.risk is not None and rows == 0:
        raise ValueError(
            "initial_batch_size must not be 0 under a risk: its weights need the value of every block, got 0"
        )
    state = State(
        step=jnp.zeros((), jnp.int32),
        x=x,
        z=zeros_like(x),
        back=way_back(recipe.upper_step, 0.0, x) if recipe.corrected else None,
        optimizer=upper_start(recipe.upper_step, x),
        levels=levels,
        clocks=clocks,
        smoothness=_used_smoothness(recipe, problem, smoothness, missing),
        floors=floors,
        sampler=sampler,
        named=problem.named,
        multipliers=tuple(name for name, tracker in trackers.items() if tracker.multiplier),
        centres=problem.centre_functions,
        domains=problem.domains if recipe.lazy else (),
        restraint=Restraint.none(result_dtype(x)),
    )
    if problem.risk is not None:
        values = _first_values(recipe, problem, state, estimated, rows)
        blocks = first_values(problem.risk, values, sampler)
        state = dataclasses.replace(state, blocks=blocks)
    state = state if rows == 0 else _first_pass(recipe, problem, state, estimated, rows)
    return _with_tables(recipe, problem, state)


def _with_means_of_step_0(
    problem: Problem, x: PyTree, y: dict[str, PyTree], sampler: Sampler, estimated: frozenset[str]
) -> dict[str, PyTree]:
    """y, with means that were not given: for all slots, what step 0 sees on average."""
    if not estimated:
        return y
    sample = sampler.draw(problem, jnp.zeros((), jnp.int32))
    rows = {name: gather(y[name], sample.slots[name]) for name in y}
    seen = with_means(problem, x, sample, rows, estimated)

    def average(name: str) -> PyTree:
        axes = tuple(range(sample.slots[name].ndim))
        return jax.tree.map(
            lambda some, every: jnp.broadcast_to(jnp.mean(some, axes), every.shape).astype(every.dtype),
            seen[name],
            y[name],
        )

    return y | {name: average(name) for name in estimated}


def _with_tables(recipe: Recipe, problem: Problem, state: State) -> State:
    """The state with the tables of x apart, if steps can catch them up: not where rows are padded."""
    rule = row_rule(recipe.upper_step, state.x) if recipe.takes_tables else None
    if not problem.tables or rule is None or padded_levels(problem, state.sampler):
        return state
    names = [name for name, _ in problem.tables]
    tables = LazyTables.of(_together(problem, state.x), state.x, state.z, result_dtype(state.x), rule)
    x = without_parts(state.x, names)
    return dataclasses.replace(
        state,
        x=x,
        z=without_parts(state.z, names),
        back=state.back if state.back is None or isinstance(state.back, Along) else x,
        optimizer=upper_start(recipe.upper_step, x),
        tables=tables,
    )


def _together(problem: Problem, x: PyTree) -> list[list[str]]:
    """The names of the tables, those in one list that have the same index, rows and dtype."""
    groups: dict[Any, list[str]] = {}
    for name, index in problem.tables:
        table = part_of(x, name)
        groups.setdefault((id(index), table.shape[0], table.dtype), []).append(name)
    return list(groups.values())


def _used_smoothness(
    recipe: Recipe,
    problem: Problem,
    estimated: dict[str, Smoothness],
    missing: dict[str, set[str]],
) -> dict[str, Smoothness]:
    """The curvature of the levels whose step was left out, or given with a scale for every entry.

    Where an optax transformation moves y, that is the step of v alone.
    """
    out = {name: known for name, known in estimated.items() if "lower_step" in missing[name]}
    for name, tracker in recipe.trackers(problem).items():
        lower, inverse = (
            evaluate(recipe.option(step), FIRST_STEP, name) for step in ("lower_step", "inverse_step")
        )
        if isinstance(lower, PerEntry):
            out[name] = Smoothness.given(lower, inverse is None)
        elif recipe.transformation(name, tracker) is not None:
            if "inverse_step" in missing[name]:
                out[name] = dataclasses.replace(estimated[name], lower=False)
            elif isinstance(inverse, PerEntry):
                out[name] = Smoothness.given(inverse, True, lower=False)
    return out


def _first_pass(
    recipe: Recipe, problem: Problem, state: State, estimated: frozenset[str], batch_size: int | None
) -> State:
    """The estimators of all slots, and z, from one batch per block at (x0, y0)."""

    def look(sample: Sample, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        levels, total = carry
        rows, z = _first_look(recipe, problem, state, levels, sample, estimated)
        levels = {n: levels[n].put(sample.slots[n], rows[n], problem.levels[n].slots is None) for n in levels}
        return levels, combine((1, total), (sample.blocks.shape[0] / problem.count, z))

    levels, z = _over_first_batches(problem, state.sampler, batch_size, look, (state.levels, state.z))
    return dataclasses.replace(state, levels=levels, z=state.sampler.mean(z))


def _first_values(
    recipe: Recipe, problem: Problem, state: State, estimated: frozenset[str], batch_size: int | None
) -> Array:
    """f of all blocks at (x0, y0), on the batches of the first pass: they weigh the blocks there."""

    def f_of(problem: Problem, state: State, sample: Sample) -> Array:
        visits = recipe.visits(problem, state, sample, 0)
        y = _first_y(recipe, problem, state, visits, sample, estimated)
        return each_block(problem, state.x, sample, lambda view, y: view.f(y), y)

    def look(sample: Sample, values: Array) -> Array:
        f = f_of(problem, state, sample).astype(values.dtype)
        return values.at[sample.blocks].set(f, unique_indices=True)

    one = state.sampler.one_block(problem, batch_size)
    dtype = result_dtype(jax.eval_shape(f_of, problem, state, one))
    blank = jnp.zeros(problem.count, dtype)
    return _over_first_batches(problem, state.sampler, batch_size, look, blank)


def _over_first_batches(
    problem: Problem, sampler: Sampler, batch_size: int | None, look: Callable[[Sample, Any], Any], carry: Any
) -> Any:
    """carry ← look(sample, carry) over all blocks, some at a time, each with its first batch."""
    size, strata = sampler.stratum_size, sampler.strata or 1

    def of_some(stratum: Any, number: Any, places: Array, carry: Any) -> Any:
        random = sampler.stream(sampler.random.at(START).at(number), stratum)
        return look(sampler.visit(problem, stratum * size + places, random, batch_size), carry)

    def of_stratum(stratum: Any, carry: Any) -> Any:
        return over_all_blocks(size, lambda *given: of_some(stratum, *given), carry)

    return of_stratum(0, carry) if strata == 1 else jax.lax.fori_loop(0, strata, of_stratum, carry)


def _first_look(
    recipe: Recipe,
    problem: Problem,
    state: State,
    levels: dict[str, SlotTable],
    sample: Sample,
    estimated: frozenset[str],
) -> tuple[dict[str, Memory], PyTree]:
    """The first memory of the visited slots, and their mean ∂ℓ/∂x."""
    trackers = recipe.trackers(problem)
    visits = recipe.visits(problem, dataclasses.replace(state, levels=levels), sample, 0)
    visits = {name: dataclasses.replace(visit, corrected=False) for name, visit in visits.items()}
    y = _first_y(recipe, problem, state, visits, sample, estimated)
    point = Point(state.x, y, state.weights(problem, sample))
    visits = {n: tracker.prepare(visits[n], problem, point, sample) for n, tracker in trackers.items()}
    look = recipe.look_at(problem, sample, visits, [point])
    return {n: tracker.first(visits[n], look) for n, tracker in trackers.items()}, look.gradients[0].x


def _first_y(
    recipe: Recipe,
    problem: Problem,
    state: State,
    visits: dict[str, Visit],
    sample: Sample,
    estimated: frozenset[str],
) -> dict[str, PyTree]:
    """y where it starts; a mean that was not given is that of its first batch."""
    y = {name: tracker.recall(visits[name])[0] for name, tracker in recipe.trackers(problem).items()}
    for _ in range(_longest_chain(problem, estimated)):
        means = gradients(problem, Point(state.x, y), zeros_like(y), sample).v  # at v = 0, ∂ℓ/∂v is c
        y = {name: means[name] if name in estimated else y[name] for name in y}
    return y


def _longest_chain(problem: Problem, estimated: frozenset[str]) -> int:
    """How many of the levels without a start read one another, at most: each needs the one before it."""
    length: dict[str, int] = {}
    for name in problem.order:
        if name in estimated:
            length[name] = 1 + max((length.get(read, 0) for read in problem.levels[name].reads), default=0)
    return max(length.values(), default=0)
