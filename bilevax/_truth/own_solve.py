"""The variables of one block that optimise f itself, of all such levels together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.view import BlockView
from bilevax._truth.curvature import is_curved_right
from bilevax._truth.lower_solve import descend_within
from bilevax._truth.roots import find_crossing, find_root
from bilevax._util.trees import PyTree, norm


class OwnSolution(NamedTuple):
    """The optimum of f in a block's own variables.

    Attributes:
      y: by level.
      residual: what is left: of the gradient of f, or of the interval that holds a single variable.
      scale: what to compare it with.
      left: about how much f would still change.
    """

    y: dict[str, PyTree]
    residual: Array
    scale: Array
    left: Array


class Minimised(NamedTuple):
    """A minimum without bounds, from a solver of the caller's choice; see `OwnSolution`."""

    y: Array
    residual: Array
    scale: Array
    left: Array


def own_levels(view: BlockView) -> list[str]:
    """The levels whose variables optimise f."""
    return [name for name, level in view.problem.levels.items() if level.own]


def solve_own(
    view: BlockView,
    others: dict[str, PyTree],
    start: dict[str, PyTree],
    minimise: Callable[[Callable[[Array], Array], Array], Minimised],
) -> OwnSolution:
    """The minimum, maximum or saddle point of one block's f in its own variables.

    A single variable is found by bisection, which does not mind kinks; variables without bounds that all
    minimise, or all maximise, by `minimise`; all others by `find_root`.

    Args:
      view: the block.
      others: the variables of the other levels.
      start: where to begin, for the levels of `own_levels`.
      minimise: a solver for smooth functions of a vector.
    """
    levels = {name: view.problem.levels[name] for name in start}
    flat, unravel = ravel_pytree(start)
    signs = ravel_pytree({n: levels[n].signed(jax.tree.map(jnp.ones_like, start[n])) for n in start})[0]

    def value(flat: Array) -> Array:
        return view.f(others | unravel(flat))

    def slope(flat: Array) -> Array:
        return signs * jax.grad(value)(flat)

    def project(flat: Array) -> Array:
        y = unravel(flat)
        return ravel_pytree({n: levels[n].bounded(y[n], 0) for n in y})[0]

    sign, *more = {level.sign for level in levels.values()}
    onto = project if any(level.is_bounded for level in levels.values()) else None
    if flat.size == 1:
        found, width = find_crossing(slope, onto, flat)
        good = jnp.all(jnp.isfinite(found)) & jnp.isfinite(value(found))
        width = jnp.where(good, width, jnp.nan)
        return OwnSolution(unravel(found), width, norm(found) + 1e-30, jnp.where(good, 0, jnp.nan))
    if sign and not more and onto is None:
        best = minimise(lambda flat: sign * value(flat), flat)
        return OwnSolution(unravel(best.y), best.residual, best.scale, best.left)
    if sign and not more and onto is not None:
        flat = descend_within(lambda flat: sign * value(flat), onto, flat)
    root = find_root(slope, onto, flat)
    left = jnp.abs(jnp.vdot(slope(root.y), root.move))
    residual = jnp.where(is_curved_right(slope, root.y, signs, onto), root.residual, jnp.nan)
    return OwnSolution(unravel(root.y), residual, root.scale, left)
