"""How x moves, and how a method that looks back recovers the x before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._step.coefficients import evaluate
from bilevax._step.ordering import known_after
from bilevax._step.pace import automatic_step
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
) -> tuple[PyTree, PyTree, PyTree]:
    """x after one step along z, the state of the transformation, and how to recover the x before.

    A transformation that takes extra arguments gets `value`, the mean of f over the batch, `lag`, by how much
    that would fall if y were y(x), `chance`, the probability that a step visits a block, and `weight`, that
    of a new batch in z.
    """
    shrunk, upper_step = 0.5 ** (0.5 * stage) * state.upper_factor, chosen_step(upper_step)
    if isinstance(upper_step, optax.GradientTransformation):
        now = known_after(z, state.x)
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


def way_back(upper_step: UpperStep | None, step: Any, x: PyTree, tables: PyTree = None) -> PyTree:
    """What a state stores to recover the x before: the step size if that is enough, else x."""
    plain = is_plain(upper_step, (x, tables))
    return Along(jnp.asarray(step, result_dtype((x, tables)))) if plain else x


def is_plain(upper_step: UpperStep | None, x: PyTree) -> bool:
    """Whether x moves by a number times z, in so many bits that the step can be undone."""
    precise = all(leaf.dtype.itemsize >= 4 for leaf in jax.tree.leaves(x))  # otherwise rounding would show
    return precise and not isinstance(chosen_step(upper_step), optax.GradientTransformation)
