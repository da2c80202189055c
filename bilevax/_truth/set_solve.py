r"""The minimiser of one block's g in a set, and its multiplier.

y = Π(y − γ∇g) with the projection Π. With P, the derivative of Π at y − γ∇g, and the Hessian H of g,
implicit differentiation gives the multiplier

.. math:: v = P w, \qquad \big((1 - P)/\gamma + H P\big)\, w = \nabla_y f

For bounds P is one on the free entries and zero on those that a bound holds: there v is zero, and on the
others H v = ∇_y f, which is the hyper-gradient of the problem with active bounds held fixed. On a curved set
it contains the curvature of the set.
"""

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
from bilevax._truth.roots import find_root, largest_derivative, solved_system
from bilevax._util.trees import PyTree

Value = Callable[[Array], Array]
Project = Callable[[Array], Array]


class Confined(NamedTuple):
    """A minimiser in a set.

    Attributes:
      y: where it is, flattened.
      residual: ‖y − Π(y − γ∇g)‖/γ there.
      scale: what to compare that with.
      move: the Newton step that is left.
      good: whether g is strictly convex in the directions in which y is free.
    """

    y: Array
    residual: Array
    scale: Array
    move: Array
    good: Array


def projection(view: BlockView, name: str, y: PyTree) -> Project:
    """The projection of a level, of flattened variables like y."""
    unravel = ravel_pytree(y)[1]
    return lambda flat: ravel_pytree(view.problem.levels[name].bounded(unravel(flat), 0))[0]


def solve_within(value: Value, project: Project, start: Array) -> Confined:
    """The minimiser of a function in a set.

    Args:
      value: the function, of a vector.
      project: onto the set.
      start: where to begin.
    """
    slope = jax.grad(value)
    root = find_root(slope, project, descend_within(value, project, start))
    good = (
        is_curved_right(slope, root.y, project=project)
        & jnp.all(jnp.isfinite(root.y))
        & jnp.isfinite(value(root.y))
    )
    return Confined(root.y, root.residual, root.scale, root.move, good)


def multiplier_within(value: Value, project: Project, y: Array, right: Array) -> tuple[Array, Array]:
    """v at a minimiser in a set, from ∇_y f, and what is left of the equation that it solves."""
    system, free = _linearised(value, project, y)
    fine = 20 * float(jnp.finfo(y.dtype).eps)
    w = solved_system(system, jnp.zeros_like(y), right, fine)
    return free(w), system(w) - right


def _linearised(
    value: Value, project: Project, y: Array
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """w ↦ (w − Pw)/γ + H P w, whose solution with the right-hand side ∇_y f has P w = v; and P."""
    slope, push = jax.linearize(jax.grad(value), y)
    size = largest_derivative(jax.grad(value), y)
    gamma = 1 / jnp.where(size > 0, size, 1)
    # A projection onto a convex set is a gradient: its derivative is symmetric.
    free = jax.linearize(project, y - gamma * slope)[1]

    def system(w: Array) -> Array:
        inside = free(w)
        return (w - inside) / gamma + push(inside)

    return system, free
