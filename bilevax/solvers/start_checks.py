"""The checks of x0, y0 and the user's functions, before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax._problem.bounds import Box, Set
from bilevax._problem.finite import check_start
from bilevax._problem.levels import Level
from bilevax._problem.lookups import check_tables
from bilevax._problem.problem import Problem
from bilevax._problem.reading import readers
from bilevax._problem.sampling import Sampler, is_streamed
from bilevax._util import checks
from bilevax._util.trees import PyTree


def check_own_slots(method: str, problem: Problem) -> None:
    """Raises if a level has slots that are not its blocks: for methods that look at whole blocks."""
    for name, level in problem.levels.items():
        if level.slots is not None:
            raise ValueError(
                f"{method} needs one slot per block, got slots of its own for the lower level {name!r}: "
                "use BSVRBv2"
            )


def check_same_rows(method: str, problem: Problem) -> None:
    """Raises if functions or rows change from step to step: for methods that return to what they saw."""
    if problem.random:
        raise ValueError(
            f"{method} needs functions that are the same in every step, got random=True: use BSVRBv2"
        )
    if is_streamed(problem):
        raise ValueError(f"{method} returns to all rows, and Streamed rows cannot all be read: use BSVRBv2")


def takers_of(domain: Box | Set) -> str:
    """The methods to use for a lower solution that stays in such a set, in the words of messages."""
    return "BlockNewton, MMBO or BSVRBv2" if domain.entrywise else "F2SA or F3SA"


def advice(problem: Problem, others: str) -> str:
    """What to do where other methods take a level, but perhaps not with all the levels beside it."""
    levels = [(name, level) for name, level in problem.levels.items() if not level.own]
    in_sets = [name for name, level in levels if level.domain is not None and not level.domain.entrywise]
    others_only = [(name, level) for name, level in levels if not level.has_hessian or level.sign != 1]
    if not in_sets or not others_only:
        return f"use {others}"
    (name, level), *_ = others_only
    return (
        f"no method takes {in_sets[0]!r} in a set that is no bounds beside the {level.kind} level {name!r}: "
        "give it bounds (lower, upper), or minimise with bx.value_and_hypergradient"
    )


def checked_start(
    problem: Problem, x0: PyTree, y0: PyTree, sampler: Sampler
) -> tuple[PyTree, dict[str, PyTree], frozenset[str]]:
    """x and what is stored of y, checked, and the mean levels that start from their first batch."""
    x = checks.floating("x0", x0)
    check_start("x0", x)
    given = dict.fromkeys(problem.levels) if y0 is None else problem.split("y0", y0)
    block, upper, lower = _one_block(problem, sampler)
    check_tables(problem.tables, x, block, problem.by_source(upper, lower))
    padded = padded_levels(problem, sampler)
    if padded and not problem.means_over_rows:
        raise ValueError(
            "means_over_rows=False does not go with ragged blocks and all rows: functions are then called on "
            "one row at a time: give batch_size"
        )
    y, one, estimated = {}, {}, set()
    for name in problem.order:
        level, label = problem.levels[name], f"y0[{name!r}]" if problem.named else "y0"
        slots, rows, earlier = problem.slots_of(name), lower[name], problem.read_by(name, one)
        own = _slot_shape(level, block, rows, name)
        _check_slots_of_readers(problem, name, own)
        if own != () and name in padded:
            raise ValueError(
                f"lower level {name!r} touches slots of shape {own}, which ragged blocks with all rows "
                "cannot: give batch_size"
            )
        if level.slots is not None and given[name] is None:
            raise ValueError(f"{label} must be given for a level with slots of its own, got None")
        value = level.shape_of_y(name, x, earlier, block, rows)
        if value is None:
            y[name] = _with_slots(label, given[name], slots, level.kind)
        else:
            expected = jax.tree.map(lambda a, own=own, n=slots: ((n, *a.shape[len(own) :]), a.dtype), value)
            if given[name] is None:
                estimated.add(name)
                shapes = jax.tree.leaves(expected, is_leaf=lambda s: isinstance(s, tuple))
                y[name] = jax.tree.unflatten(jax.tree.structure(value), [jnp.zeros(*s) for s in shapes])
            else:
                y[name] = _with_slots(label, given[name], slots, level.kind)
                got = jax.tree.map(lambda a: (a.shape, a.dtype), y[name])
                if jax.tree.structure(y[name]) != jax.tree.structure(value) or got != expected:
                    raise ValueError(
                        f"{label} must have the shapes of the mean it tracks, {expected}, got {got}"
                    )
        one[name] = _of_one_block(y[name], own)
        level.check(name, x, one[name], block, rows, earlier)
        if name not in estimated:
            _check_feasible(label, name, level, y[name])
        y[name] = level.bounded(y[name])
    y, one = ({name: tree[name] for name in problem.levels} for tree in (y, one))
    checks.scalar_output("upper", problem.upper, x=x, y=problem.view(one), block=block, batch=upper)
    return x, problem.offsets(x, y), frozenset(estimated)


def _check_slots_of_readers(problem: Problem, name: str, own: tuple[int, ...]) -> None:
    """Raises if a level that reads another, or is read, has several slots per block."""
    others = [*problem.levels[name].reads, *readers(problem.levels, name)]
    if others and own != ():
        raise ValueError(
            f"lower levels that read one another need one slot per block, got slots of shape {own} for the "
            f"level {name!r}, which goes with {others[0]!r}"
        )


def check_feasible(problem: Problem, y0: PyTree) -> None:
    """Raises if a lower variable that descends within a set starts outside of it."""
    if not problem.domains or y0 is None:
        return
    for name, y in problem.split("y0", y0).items():
        label, leaves = f"y0[{name!r}]" if problem.named else "y0", jax.tree.leaves(y)
        if y is not None and all(np.ndim(leaf) and np.shape(leaf)[0] for leaf in leaves):
            _check_feasible(label, name, problem.levels[name], jax.tree.map(jnp.asarray, y))


def _check_feasible(label: str, name: str, level: Level, y: PyTree) -> None:
    if level.domain is None:
        return
    given = f"project of the {level.kind} level {name!r}"
    level.domain.check(given, _of_one_block(y, ()))
    leaves = jax.tree.leaves(y)
    if any(checks.is_traced(leaf) or not _is_here(leaf) for leaf in leaves):
        return
    with jax.ensure_compile_time_eval():  # y may be known while a program that starts from it is traced
        level.domain.check_values(given, y)
        found = jax.tree.leaves(level.bounded(y))
    if any(map(checks.is_traced, found)):
        return
    for leaf, nearest in zip(map(np.asarray, leaves), map(np.asarray, found), strict=True):
        rounding = 100 * float(jnp.finfo(leaf.dtype).eps)
        far = np.abs(leaf - nearest) > rounding * (1 + np.abs(leaf))
        if far.any():
            slot = int(np.flatnonzero(far.reshape(far.shape[0], -1).any(1))[0])
            raise ValueError(
                f"{label} must start in the set that project= gives, got {leaf[slot]} in slot {slot}, "
                f"whose nearest point in the set is {nearest[slot]}"
            )


def _is_here(leaf: Any) -> bool:
    return getattr(leaf, "is_fully_addressable", False)


def padded_levels(problem: Problem, sampler: Sampler) -> set[str]:
    """The levels whose batches are padded: then user functions see their rows one at a time."""
    sample = sampler.one_block(problem, sampler.batch_size, slots=False)
    return {
        n for n, batch in sample.lower.items() if batch.weight is not None or sample.upper.weight is not None
    }


def _of_one_block(y: PyTree, own: tuple[int, ...]) -> PyTree:
    """The shapes of what one block sees of a level's variables."""
    return jax.tree.map(lambda a: _shape(a, own + a.shape[1:]), y)


def _with_slots(label: str, value: PyTree, slots: int, kind: str) -> PyTree:
    if value is None:
        raise ValueError(
            f"{label} must be given for {'an' if kind[0] in 'aeiou' else 'a'} {kind} level, with a leading "
            f"axis of {slots} slots, got None"
        )
    tree = checks.floating(label, value)
    check_start(label, tree, slots=True)
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


def touched_slots(problem: Problem, sampler: Sampler, name: str) -> int:
    """How many slots of a level a step touches."""
    return sampler.per_step * math.prod(slot_shape(problem, sampler, name))


def _slot_shape(level: Level, block: PyTree, rows: PyTree, name: str) -> tuple[int, ...]:
    if level.slots is None:
        return ()
    out = checks.traced(f"slots of lower level {name!r}", level.slots, block=block, batch=rows)
    if not (hasattr(out, "dtype") and jnp.issubdtype(out.dtype, jnp.integer) and len(out.shape) <= 1):
        raise ValueError(
            f"slots of lower level {name!r} must return one integer or a vector of them, got "
            f"{checks.shapes(out)}"
        )
    return out.shape
