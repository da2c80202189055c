"""An average of the latest x, beside any optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from bilevax._util import checks
from bilevax._util.trees import PyTree

_EARLY = 0.1  # before the window is full, the average is over about this share of the steps so far


class Averaged(NamedTuple):
    """The state of `averaged`.

    Attributes:
      count: how many x were averaged.
      average: of them, in float32 or better; x itself before the first.
      inner: the state of the transformation.
    """

    count: Array
    average: PyTree
    inner: PyTree


def averaged(upper_step: optax.GradientTransformation, window: Any) -> optax.GradientTransformation:
    """An upper step that also keeps an average of x, and changes nothing else.

    With constant steps x fluctuates around its limit. Its average over the latest steps fluctuates less. The
    weights fall by 1/e over `window` steps, or over a tenth of the steps so far while that is less. The
    average is over the x that steps start from, so the last x is not in it yet. `state.average` is the
    average; so are `result.x` and `result.best.x` of `bx.minimize`, and `found.x` of `bx.sweep`.

    Args:
      upper_step: how x moves.
      window: how many steps, 1 or more.

    Returns:
      A transformation, for the `upper_step` of any solver, alone or in a chain.

    Raises:
      TypeError: if `upper_step` is not an optax transformation.
      ValueError: if the window is less than 1.

    Example:
      >>> import bilevax as bx, optax
      >>> solver = bx.BSVRBv2(upper_step=bx.averaged(optax.adam(1e-3), window=500))
    """
    if not isinstance(upper_step, optax.GradientTransformation):
        raise TypeError(f"upper_step must be an optax transformation, got {type(upper_step).__name__}")
    checks.number("window", window, 1.0)
    with_rows = getattr(upper_step, "averaged", None)
    if with_rows is not None:  # it keeps what it knows of rows beside them
        return with_rows(window)

    def init(params: PyTree) -> Averaged:
        return Averaged(jnp.zeros((), jnp.int32), jax.tree.map(_wide, params), upper_step.init(params))

    inner_update = optax.with_extra_args_support(upper_step).update

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Averaged]:
        if params is None:
            raise ValueError("averaged needs params: call update(updates, state, params), got None")
        updates, inner = inner_update(updates, state.inner, params, **extra)
        # x before the step: the solver may scale the updates (in a stage of a restart).
        share = share_of(state.count, window)
        average = jax.tree.map(
            lambda mean, x: mean + share.astype(mean.dtype) * (x - mean), state.average, params
        )
        return updates, Averaged(jnp.asarray(optax.safe_increment(state.count)), average, inner)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def share_of(count: Array, window: Any) -> Array:
    """The share of the next x in the average, after so many."""
    return jnp.maximum(1 / jnp.asarray(window, float), 1 / (1 + _EARLY * jnp.asarray(count, float)))


def with_average(optimizer: PyTree, change: Callable[[PyTree], PyTree]) -> PyTree:
    """An optimizer's state with the average changed, if it keeps one."""

    def changed(node: Any) -> Any:
        return node._replace(average=change(node.average)) if isinstance(node, Averaged) else node

    return jax.tree.map(changed, optimizer, is_leaf=lambda node: isinstance(node, Averaged))


def average_of(optimizer: PyTree, x: PyTree) -> PyTree:
    """The average that an optimizer's state keeps, with the dtypes of x; x if it keeps none."""
    nodes = jax.tree.leaves(optimizer, is_leaf=lambda node: isinstance(node, Averaged))
    averages = [node.average for node in nodes if isinstance(node, Averaged)]
    return jax.tree.map(lambda mean, one: mean.astype(one.dtype), averages[0], x) if averages else x


def _wide(leaf: Array) -> Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
