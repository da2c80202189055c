"""The saddle point of one block's g."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.view import BlockView
from bilevax._truth.curvature import is_curved_right
from bilevax._truth.roots import find_root, solved_system
from bilevax._util.trees import PyTree


class SaddlePoint(NamedTuple):
    """A saddle point.

    Attributes:
      y: where it is, flattened.
      residual: the size of the gradient there.
      scale: what to compare that with.
      move: the Newton step that is left.
      good: whether g is convex there in what minimises it, and concave in what maximises it.
    """

    y: Array
    residual: Array
    scale: Array
    move: Array
    good: Array


def solve_saddle(view: BlockView, name: str, y: PyTree, others: dict[str, PyTree]) -> SaddlePoint:
    """The saddle point of a level in one block, from y; `others` has the variables that it reads."""
    level = view.problem.levels[name]
    flat, unravel = ravel_pytree(y)
    signs = ravel_pytree(level.signed(jax.tree.map(jnp.ones_like, y)))[0]

    def slope(flat: Array) -> Array:
        return signs * jax.grad(lambda flat: view.g(name, unravel(flat), others))(flat)

    root = find_root(slope, None, flat)
    good = is_curved_right(slope, root.y, signs) & jnp.all(jnp.isfinite(root.y))
    return SaddlePoint(root.y, root.residual, root.scale, root.move, good)


def indefinite_inverse(gradient: Callable[[Array], Array], y: Array) -> Callable[[Array], Array]:
    """Multiplies a vector by the inverse of a Hessian that need not be definite."""
    fine = 20 * float(jnp.finfo(y.dtype).eps)
    return lambda right: solved_system(gradient, y, right, fine)
