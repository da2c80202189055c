"""How x moves, and how a method that looks back recovers the x before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._step.coefficients import evaluate
from bilevax._step.lazy_adam import LazyStep
from bilevax._step.lazy_tables import LazyTables, RowRule
from bilevax._step.ordering import known_after
from bilevax._step.pace import automatic_step
from bilevax._step.plain_rows import PlainRows
from bilevax._step.state import Along, State
from bilevax._util.trees import PyTree, combine, result_dtype

UpperStep = float | Callable[[Array], Array] | optax.GradientTransformation


def upper_move(
    upper_step: UpperStep | None,
    state: State,
    z: PyTree,
    stage: Array | int,
    value: Array,
    lag: Array,
    chance: float,
    weight: Any,
    added: PyTree = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """x after one step along z, the state of the transformation, and how to recover the x before.

    A transformation that takes extra arguments gets `value`, the mean of f over the batch, `lag`, by how much
    that would fall if y were y(x), `chance`, the probability that a step visits a block, and `weight`, that
    of a new batch in z. `added` is what the step adds to tables of x, which it read x for.
    """
    shrunk, upper_step = _factor(state, stage), chosen_step(upper_step)
    if isinstance(upper_step, optax.GradientTransformation):
        now = known_after((z, added), state.x)
        more = isinstance(upper_step, optax.GradientTransformationExtraArgs)
        known = {"value": value, "lag": lag, "chance": chance, "weight": weight}
        extra: dict[str, Any] = known if more else {}
        updates, optimizer = upper_step.update(z, state.optimizer, now, **extra)
        return combine((1, now), (shrunk, updates)), optimizer, now
    step = evaluate(upper_step, state.step) * shrunk
    back = way_back(upper_step, step, state.x, state.tables)
    return combine((1, state.x), (-step, z)), state.optimizer, back


def chosen_step(upper_step: UpperStep | None) -> UpperStep:
    """The upper step that was given, or the automatic one."""
    return automatic_step() if upper_step is None else upper_step


def upper_start(upper_step: UpperStep | None, x: PyTree) -> PyTree:
    """The state of an optax transformation before its first step; None for a plain step."""
    upper_step = chosen_step(upper_step)
    return upper_step.init(x) if isinstance(upper_step, optax.GradientTransformation) else None


def way_back(upper_step: UpperStep | None, step: Any, x: PyTree, tables: LazyTables | None = None) -> PyTree:
    """What a state stores to recover the x before: the step size if that is enough, else x."""
    plain = _is_precise(x) and not isinstance(chosen_step(upper_step), optax.GradientTransformation)
    return Along(jnp.asarray(step, result_dtype((x, tables)))) if plain else x


def row_rule(upper_step: UpperStep | None, x: PyTree) -> RowRule | None:
    """How rows of tables move that are caught up when they are looked up; None if they cannot be."""
    upper_step = chosen_step(upper_step)
    if not _is_precise(x):
        return None
    if isinstance(upper_step, LazyStep):
        return upper_step.adam.rule
    return None if isinstance(upper_step, optax.GradientTransformation) else PlainRows()


def row_pace(upper_step: UpperStep | None, state: State, stage: Array | int) -> Array:
    """How far the rows of tables move in a step, in the numbers of their rule."""
    upper_step, factor = chosen_step(upper_step), _factor(state, stage)
    assert state.tables is not None
    dtype = state.tables.pace.dtype
    if isinstance(upper_step, LazyStep):
        return upper_step.adam.pace(state.step, factor, dtype)
    assert not isinstance(upper_step, optax.GradientTransformation)
    return jnp.asarray(evaluate(upper_step, state.step) * factor, dtype)[None]


def _factor(state: State, stage: Array | int) -> Any:
    """What the moves of x are multiplied by: in a stage of a restart, and after a blow-up."""
    return 0.5 ** (0.5 * stage) * state.upper_factor


def _is_precise(x: PyTree) -> bool:
    """Whether x has so many bits that steps can be undone, or many of them made at once."""
    return all(leaf.dtype.itemsize >= 4 for leaf in jax.tree.leaves(x))  # otherwise rounding would show
