"""The checks of what a run is given, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.levels import Argmin
from bilevax._problem.problem import Problem
from bilevax._problem.sampling import Sampler
from bilevax._step.trackers import TrackedHessian
from bilevax._util import checks
from bilevax._util.trees import PyTree

_COEFFICIENTS = (
    "upper_step", "lower_step", "inverse_step", "alpha", "alpha_bar", "beta", "gamma", "gamma_bar", "radius",
    "floor", "refresh_chance",
)  # fmt: skip


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
    value = value(jnp.zeros((), jnp.int32)) if callable(value) else value
    unknown = value is None or checks.is_traced(value)
    return not unknown and bool(np.asarray(value) >= 1)


def check_hessian_slots(trackers: dict[str, Any], problem: Problem, sampler: Sampler) -> None:
    """Raises if a Hessian is to be tracked over several slots of a block."""
    for name, tracker in trackers.items():
        shape = slot_shape(problem, sampler, name)
        if isinstance(tracker, TrackedHessian) and shape != ():
            raise ValueError(
                f"a tracked Hessian needs one slot per block, got slots of shape {shape} for the lower level "
                f"{name!r}: use BSVRBv2, which tracks no Hessian"
            )


def check_own_slots(solver: Any, problem: Problem) -> None:
    """Raises if a level has slots that are not its blocks: for methods that look at whole blocks."""
    for name, level in problem.levels.items():
        if level.slots is not None:
            raise ValueError(
                f"{type(solver).__name__} needs one slot per block, got slots of its own for the lower level "
                f"{name!r}: use BSVRBv2"
            )


def check_factorable(name: str, y: PyTree) -> None:
    """Raises if a level's Hessians could not be factorised for their dtype."""
    for leaf in jax.tree.leaves(y):
        if leaf.dtype.itemsize < 4:
            raise TypeError(
                f"y0 of the lower level {name!r} must be float32 or float64 for a method that factorises "
                f"Hessians, got {leaf.dtype}: use BSVRBv2"
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
    padded = _padded(problem, sampler)
    y, one, estimated = {}, {}, set()
    for name, level in problem.levels.items():
        label = f"y0[{name!r}]" if problem.named else "y0"
        slots, rows = problem.slots_of(name), lower[name]
        own = _slot_shape(level, block, rows, name)
        if own != () and name in padded:
            raise ValueError(
                f"lower level {name!r} touches slots of shape {own}, which ragged blocks with all rows "
                "cannot: give batch_size"
            )
        if level.slots is not None and given[name] is None:
            raise ValueError(f"{label} must be given for a level with slots of its own, got None")
        if isinstance(level, Argmin):
            y[name] = _with_slots(label, given[name], slots)
            one[name] = _of_one_block(y[name], own)
            given_here = {"x": x, "y": one[name], "block": block, "batch": rows}
            checks.scalar_output(f"lower level {name!r}", level.function, **given_here)
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
        one[name] = _of_one_block(y[name], own)
    checks.scalar_output("upper", problem.upper, x=x, y=problem.view(one), block=block, batch=upper)
    return x, y, frozenset(estimated)


def _padded(problem: Problem, sampler: Sampler) -> set[str]:
    """The levels whose batches are padded: then user functions see their rows one at a time."""
    sample = sampler.one_block(problem, sampler.batch_size, slots=False)
    return {
        n for n, batch in sample.lower.items() if batch.weight is not None or sample.upper.weight is not None
    }


def _of_one_block(y: PyTree, own: tuple[int, ...]) -> PyTree:
    """The shapes of what one block sees of a level's variables."""
    return jax.tree.map(lambda a: _shape(a, own + a.shape[1:]), y)


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

    sample = sampler.one_block(problem, sampler.batch_size, slots=False)

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
