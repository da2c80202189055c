"""The state before the first step, and the checks of what a run is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from bilevax import checks
from bilevax.curvature import (
    Clocks,
    Identity,
    TrackedHessian,
    TrackedSolve,
    flatten_slots,
    raise_eigenvalues,
    solve,
    unflatten_slots,
)
from bilevax.lagrangian import Point, gradients, hessians, upper_gradients
from bilevax.memory import Clock, Memory, Moving, Reading, gather, scatter
from bilevax.problem import Argmin, Problem
from bilevax.sampling import START, Sample, Sampler, make_sampler
from bilevax.smoothness import estimate_floor, estimate_smoothness
from bilevax.solvers.state import State
from bilevax.trees import PyTree, combine, result_dtype, zeros_like

NEVER = -2  # a last visit that no step's predecessor equals
_COEFFICIENTS = (
    "upper_step", "lower_step", "inverse_step", "alpha", "alpha_bar", "beta", "gamma", "gamma_bar", "radius",
    "floor",
)  # fmt: skip
_GROUP = 128  # blocks looked at together by the first pass over all blocks


def start_state(
    recipe: Any,
    problem: Problem,
    x0: PyTree,
    y0: PyTree,
    key: Array,
    blocks_per_step: int | None,
    batch_size: int | None,
    shuffle: bool,
    initial_batch_size: Any,
) -> State:
    """The state of a recipe before its first step; see `Recipe.init`."""
    sampler = make_sampler(problem, key, blocks_per_step, batch_size, shuffle)
    rows = first_rows(initial_batch_size, batch_size)
    trackers = recipe.trackers(problem)
    check_coefficients(recipe, problem, sampler)
    x, y, estimated = checked_start(problem, x0, y0, sampler)
    _check_hessian_slots(trackers, problem, sampler)
    missing = {n: recipe.missing(n) for n, t in trackers.items() if not isinstance(t, Identity)}
    probed = rows == 0 or any(missing.values())
    smoothness = estimate_smoothness(problem, x, y, sampler) if probed else {}
    floors = {
        n: estimate_floor(problem, n, x, y, sampler, smoothness[n]) for n in missing if "floor" in missing[n]
    }
    clocks = {n: Clocks(Clock.start(result_dtype(y[n])), Clock.start(result_dtype(y[n]))) for n in trackers}
    levels = {
        n: _blank(t, y[n], recipe.corrected, recipe.lazy, smoothness.get(n, 1.0)) for n, t in trackers.items()
    }
    optimizer = (
        recipe.upper_step.init(x) if isinstance(recipe.upper_step, optax.GradientTransformation) else None
    )
    before = x if recipe.corrected else None
    step = jnp.zeros((), jnp.int32)
    state = State(
        step, x, before, zeros_like(x), optimizer, levels, clocks, smoothness, floors, sampler, problem.named
    )
    return state if rows == 0 else _first_pass(recipe, problem, state, estimated, rows)


def check_coefficients(solver: Any, problem: Problem, sampler: Sampler) -> None:
    """Raises if a coefficient does not fit the problem: its levels, its shape, or α = 1 without a γ."""
    options = {name: getattr(solver, name, None) for name in _COEFFICIENTS}
    for name, value in options.items():
        checks.fits(name, value, sorted(problem.levels) if problem.named else None)

    def known(name: str, level: str) -> Any:
        value = options[name]
        return value.get(level) if isinstance(value, Mapping) else value

    for level in problem.levels:
        if isinstance(options["alpha"], Mapping) and level not in options["alpha"]:
            named = sorted(options["alpha"])
            raise ValueError(f"alpha must name every lower level, got {named}, without {level!r}")
        if not getattr(solver, "corrected", False):
            continue
        for alpha, gamma in (("alpha", "gamma"), ("alpha_bar", "gamma_bar")):
            given = known(gamma, level) is not None or known("gamma", level) is not None
            if given or not _is_one(known(alpha, level)):
                continue
            touched = sampler.per_step * int(np.prod(slot_shape(problem, sampler, level)))
            if sampler.chance(problem, level, touched) < 1:
                raise ValueError(
                    f"{alpha} must be less than 1 where {gamma} is left out and a step visits {touched} of "
                    f"{problem.slots_of(level)} slots, got {alpha} = 1: (m−I)/(I(1−α)) + (1−α) is infinite"
                )


def _is_one(value: Any) -> bool:
    unknown = value is None or callable(value) or checks.is_traced(value)
    return not unknown and bool(np.asarray(value) >= 1)


def _check_hessian_slots(trackers: dict[str, Any], problem: Problem, sampler: Sampler) -> None:
    for name, tracker in trackers.items():
        shape = slot_shape(problem, sampler, name)
        if isinstance(tracker, TrackedHessian) and shape != ():
            raise ValueError(
                f"a tracked Hessian needs one slot per block, got slots of shape {shape} for the lower level "
                f"{name!r}: use BSVRBv2, which tracks no Hessian"
            )


def first_rows(initial_batch_size: Any, batch_size: int | None) -> int | None:
    """The rows per block of the first pass: None for all of them, 0 for no pass."""
    if initial_batch_size is None:
        return batch_size
    if isinstance(initial_batch_size, str):
        if initial_batch_size != "all":
            raise ValueError(
                f"initial_batch_size must be an integer, None or 'all', got {initial_batch_size!r}"
            )
        return None
    return checks.whole_number("initial_batch_size", initial_batch_size, 0)


def checked_start(
    problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler
) -> tuple[PyTree, dict[str, PyTree], frozenset[str]]:
    """x and the y of all levels as arrays, all shapes checked, and the mean levels left to estimate."""
    x = checks.floating("x0", x0)
    given = dict.fromkeys(problem.levels) if y0 is None else problem.split("y0", y0)
    block, upper, lower = _one_block(problem, sampler)
    y, estimated = {}, set()
    for name, level in problem.levels.items():
        label = f"y0[{name!r}]" if problem.named else "y0"
        slots, rows = problem.slots_of(name), lower[name]
        own = _slot_shape(level, block, rows, name)
        if isinstance(level, Argmin):
            y[name] = _with_slots(label, given[name], slots)
            one = jax.tree.map(lambda a, own=own: jax.ShapeDtypeStruct(own + a.shape[1:], a.dtype), y[name])
            checks.scalar_output(f"lower level {name!r}", level.function, x=x, y=one, block=block, batch=rows)
            continue
        value = checks.floating_output(f"lower level {name!r}", level.function, x=x, block=block, batch=rows)
        expected = jax.tree.map(lambda a, own=own, n=slots: ((n, *a.shape[len(own) :]), a.dtype), value)
        if given[name] is None:
            estimated.add(name)
            y[name] = jax.tree.map(lambda s: jnp.zeros(*s), expected, is_leaf=lambda s: isinstance(s, tuple))
        else:
            y[name] = _with_slots(label, given[name], slots)
            got = jax.tree.map(lambda a: (a.shape, a.dtype), y[name])
            if jax.tree.structure(y[name]) != jax.tree.structure(value) or got != expected:
                raise ValueError(f"{label} must have the shapes of the mean it tracks, {expected}, got {got}")
    seen = {}
    for name, level in problem.levels.items():
        own = _slot_shape(level, block, lower[name], name)
        seen[name] = jax.tree.map(
            lambda a, own=own: jax.ShapeDtypeStruct(own + a.shape[1:], a.dtype), y[name]
        )
    checks.scalar_output("upper", problem.upper, x=x, y=problem.view(seen), block=block, batch=upper)
    return x, y, frozenset(estimated)


def _with_slots(label: str, value: PyTree, slots: int) -> PyTree:
    if value is None:
        raise ValueError(
            f"{label} must be given for an argmin level, with a leading axis of {slots} slots, got None"
        )
    tree = checks.floating(label, value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.ndim == 0 or leaf.shape[0] != slots:
            raise ValueError(
                f"{label}{jax.tree_util.keystr(path)} must have a leading axis of {slots} "
                f"(one entry per block or slot), got shape {leaf.shape}"
            )
    return tree


def _one_block(problem: Problem, sampler: Sampler) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
    """The shapes of one block's constants and batches, as the user's functions receive them."""

    def look(problem: Problem, sampler: Sampler) -> Sample:
        return sampler.visit(
            problem, jnp.zeros(1, jnp.int32), sampler.random, sampler.batch_size, slots=False
        )

    sample = jax.eval_shape(look, problem, sampler)

    def one(batch: Any) -> PyTree:
        leaves = jax.tree.map(lambda a: a if batch.shared else _shape(a, a.shape[1:]), batch.rows)
        return (
            leaves if batch.weight is None else jax.tree.map(lambda a: _shape(a, (1, *a.shape[1:])), leaves)
        )

    constants = jax.tree.map(lambda a: _shape(a, a.shape[1:]), sample.constants)
    return constants, one(sample.upper), {name: one(batch) for name, batch in sample.lower.items()}


def _shape(leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def slot_shape(problem: Problem, sampler: Sampler, name: str) -> tuple[int, ...]:
    """The shape of the slots that one block touches at a level: () for one slot."""
    if problem.levels[name].slots is None:
        return ()
    block, _, lower = _one_block(problem, sampler)
    return _slot_shape(problem.levels[name], block, lower[name], name)


def _slot_shape(level: Any, block: PyTree, rows: PyTree, name: str) -> tuple[int, ...]:
    if level.slots is None:
        return ()
    out = checks.traced(f"slots of lower level {name!r}", level.slots, block=block, batch=rows)
    if not (hasattr(out, "dtype") and jnp.issubdtype(out.dtype, jnp.integer) and len(out.shape) <= 1):
        raise ValueError(
            f"slots of lower level {name!r} must return one integer or a vector of them, got {out}"
        )
    return out.shape


def _blank(tracker: Any, y: PyTree, corrected: bool, lazy: bool, smoothness: Any) -> Memory:
    """The memory of a level whose estimators are all zero (a tracked Hessian: L_g times the identity)."""
    slots = jax.tree.leaves(y)[0].shape[0]
    dtype = result_dtype(y)
    visit = jnp.full((slots,), NEVER, jnp.int32) if corrected else None

    def resting(value: PyTree) -> Moving:
        stamp = Reading(jnp.zeros((slots,), dtype), jnp.zeros((slots,), dtype)) if lazy else None
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
    group = min(problem.count, _GROUP)
    groups, rest = divmod(problem.count, group)

    def look(number: Any, blocks: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        levels, total = carry
        sample = state.sampler.visit(problem, blocks, state.sampler.random.at(START).at(number), batch_size)
        rows, z = _first_look(recipe, problem, state, levels, sample, estimated)
        levels = {name: scatter(levels[name], sample.slots[name], rows[name]) for name in levels}
        return levels, combine((1, total), (blocks.shape[0] / problem.count, z))

    def whole_group(number: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return look(number, number * group + jnp.arange(group), carry)

    carry = jax.lax.fori_loop(0, groups, whole_group, (state.levels, state.z))
    if rest:
        carry = look(groups, jnp.arange(problem.count - rest, problem.count), carry)
    levels, z = carry
    return State(
        state.step, state.x, state.x_before, z, state.optimizer, levels, state.clocks, state.smoothness,
        state.floors, state.sampler, state.named,
    )  # fmt: skip


def _first_look(
    recipe: Any,
    problem: Problem,
    state: State,
    levels: dict[str, Memory],
    sample: Sample,
    estimated: frozenset[str],
) -> tuple[dict[str, Memory], PyTree]:
    trackers = recipe.trackers(problem)
    rows = {name: gather(levels[name], sample.slots[name]) for name in levels}
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
            u = combine((-1, seen.y[name]))
            out[name] = Memory(y=moving, v=Moving(row.v.value, u, row.v.stamp), visit=row.visit)
        else:
            kept = hessian[name] if recipe.corrected else None
            out[name] = Memory(y=moving, hessian=hessian[name], previous=kept, visit=row.visit)
    return out, seen.x
