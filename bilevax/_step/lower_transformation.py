"""An optax transformation as the step of a lower variable: its state is stored per slot.

A slot's transformation sees the slot's tracked gradient and its variable when the slot is visited, and not
otherwise. So it goes with methods that move the visited slots only: between two visits a lazy slot moves
along a constant slope, which a transformation's moves are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._step.slots import Memory, Moving
from bilevax._step.visit import Visit
from bilevax._util import checks
from bilevax._util.trees import PyTree, combine, zeros_like


def transformation_of(lower_step: Any, level: str) -> optax.GradientTransformation | None:
    """The transformation that moves the variable of a level; None if plain steps do."""
    given = lower_step.get(level) if isinstance(lower_step, Mapping) else lower_step
    return given if isinstance(given, optax.GradientTransformation) else None


def has_transformation(lower_step: Any) -> bool:
    """Whether a transformation moves the variable of any level."""
    given = list(lower_step.values()) if isinstance(lower_step, Mapping) else [lower_step]
    return any(isinstance(one, optax.GradientTransformation) for one in given)


def without_transformations(lower_step: Any) -> Any:
    """A step, or a dict of them by level, with None in place of transformations."""
    if isinstance(lower_step, Mapping):
        return {level: without_transformations(one) for level, one in lower_step.items()}
    return None if isinstance(lower_step, optax.GradientTransformation) else lower_step


def refuse_transformation(method: str, lower_step: Any) -> None:
    """Raises if a method whose slots all move is given a transformation."""
    if has_transformation(lower_step):
        raise TypeError(
            f"lower_step of {method} must be a number or a schedule, got an optax transformation: {method} "
            "moves the blocks that a step does not visit, too, and a transformation cannot catch them up. "
            "Use MMBO, MASOBA or SOBA, which move the visited blocks only"
        )


def with_transformation(
    memory: Memory, transformation: optax.GradientTransformation, name: str, corrected: bool, twin: bool
) -> Memory:
    """The memory of all slots of a level, with the state of its transformation before the first step.

    A corrected method also keeps the last move of every slot, to undo it. A `twin` moves as y does.
    """
    y = memory.y
    assert isinstance(y, Moving)
    _check(transformation, name, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), y.value))

    def begun(variable: Moving) -> Moving:
        optimizer = jax.vmap(transformation.init)(variable.value)
        earlier = zeros_like(variable.value) if corrected else variable.earlier
        return dataclasses.replace(variable, optimizer=optimizer, earlier=earlier)

    assert memory.v is not None or not twin
    return dataclasses.replace(memory, y=begun(y), v=begun(memory.v) if twin and memory.v else memory.v)


def transformed_move(
    visit: Visit, old: Moving, value: PyTree, slope: PyTree, refreshed: bool, factor: Array
) -> Moving:
    """What to store of visited slots, which their transformation moves along a slope.

    Args:
      visit: the visit, with its transformation.
      old: what was stored.
      value: the variable now.
      slope: the refreshed slope.
      refreshed: whether to move along it, or along the one from before.
      factor: of the moves.
    """
    assert visit.transformation is not None
    update: Any = visit.transformation.update
    for _ in range(visit.slot_axes):
        update = jax.vmap(update)
    moves, optimizer = update(slope if refreshed else old.slope, old.optimizer, value)
    optimizer = jax.tree.map(lambda new, like: new.astype(like.dtype), optimizer, old.optimizer)
    back = None if old.earlier is None else jax.tree.map(jnp.negative, moves)
    return Moving(combine((1, value), (factor, moves)), slope, None, back, optimizer)


def _check(transformation: optax.GradientTransformation, name: str, y: PyTree) -> None:
    """Raises if a transformation cannot move a slot's variable, step after step."""
    label = f"the optax transformation lower_step of the lower level {name!r}"
    before = checks.traced(f"{label}, init,", transformation.init, y=y)
    moves, after = checks.traced(f"{label}, update,", transformation.update, gradient=y, state=before, y=y)
    if _shapes(moves) != _shapes(y):
        raise ValueError(f"{label} must return moves of the shapes of y, {_shapes(y)}, got {_shapes(moves)}")
    if jax.tree.map(lambda a: a.shape, after) != jax.tree.map(lambda a: a.shape, before):
        raise ValueError(
            f"{label} must return a state of the shapes of the one before, {_shapes(before)}, "
            f"got {_shapes(after)}"
        )
    for leaf in jax.tree.leaves(before):
        if not jnp.issubdtype(leaf.dtype, jnp.number):
            raise TypeError(f"the state of {label} must hold numbers, got {leaf.dtype}")


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree)
