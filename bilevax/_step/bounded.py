"""An upper step that keeps x in a box."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from bilevax._problem.bounds import Box, as_bound, check_crossing, check_order
from bilevax._util import checks
from bilevax._util.trees import PyTree


def bounded(upper_step: Any, lower: PyTree = None, upper: PyTree = None) -> optax.GradientTransformation:
    """An upper step that keeps every entry of x between two bounds.

    The step is taken, and x is set to the nearest point of the box. An x0 outside is moved in by the first
    step.

    Args:
      upper_step: how x moves: a number η for x − η z, or an optax transformation.
      lower, upper: a number, or a tree of arrays that broadcast to x; None for no bound. At least one.

    Returns:
      A transformation, for the `upper_step` of any solver. It must see the whole step: in a chain it is the
      last, and a wrapper such as `averaged` goes around it.

    Raises:
      TypeError, ValueError: if `upper_step` is no step, there is no bound, or lower exceeds upper.

    Example:
      >>> import bilevax as bx, optax
      >>> solver = bx.SOBA(upper_step=bx.bounded(optax.adam(1e-3), lower=-12.0, upper=2.0))
    """
    checks.upper_step(upper_step)
    if upper_step is None or (
        callable(upper_step) and not isinstance(upper_step, optax.GradientTransformation)
    ):
        raise TypeError(
            "upper_step must be a number or an optax transformation, got "
            f"{type(upper_step).__name__}: write a schedule as optax.sgd(schedule), and automatic steps as "
            "bx.automatic_step()"
        )
    box = Box(as_bound("lower", lower), as_bound("upper", upper))
    if box.lower is None and box.upper is None:
        raise ValueError("lower or upper must be given, got None for both")
    check_order(box.lower, box.upper)
    moving = upper_step if isinstance(upper_step, optax.GradientTransformation) else optax.sgd(upper_step)
    inner_update = optax.with_extra_args_support(moving).update

    def init(params: PyTree) -> PyTree:
        for name, bound in (("lower", box.lower), ("upper", box.upper)):
            if bound is not None:
                bound.check(f"{name} of bounded", jax.eval_shape(lambda: params), "x")
        check_crossing("bounded", box.lower, box.upper, params)
        return moving.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError("bounded needs params: call update(updates, state, params), got None")
        updates, state = inner_update(updates, state, params, **extra)
        # A part of an update, as in a stage of a restart, stays in the box too: it is convex.
        there = box(jax.tree.map(jnp.add, params, updates))
        return jax.tree.map(jnp.subtract, there, params), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
