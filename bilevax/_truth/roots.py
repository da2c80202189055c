"""A point where an operator vanishes on a set: min-max problems, and minima within bounds.

y solves R(y) = y − Π(y − γ F(y)) = 0, where Π projects onto the set and F is the gradient of what y
optimises, negated in the entries that maximise. Without a set R is γ F. Extragradient steps come first; then
Newton's method, with the derivative of the projection, and steps that are halved until ‖R‖ falls. Both
converge if F is strongly monotone: from a g that is strongly convex in what minimises it, and strongly
concave in what maximises it.

Without a set, all is done in units of the entries of y in which the diagonal of F's derivative is one. A
start may be far, where these units and what counts as rounding are others: so it is done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.sparse.linalg import gmres

from bilevax._step.linear_algebra import one_by_one
from bilevax._truth.lower_solve import unit_diagonal

DENSE = 512  # variables, up to which the derivative is a matrix
_FIRST, _NEWTON, _HALVINGS = 100, 60, 30
_ROUNDING = 20  # times the unit of rounding: of the change of F, what is nothing
_POWER = 30
_BISECTIONS = 200

Operator = Callable[[Array], Array]


class Root(NamedTuple):
    """A root.

    Attributes:
      y: where it is.
      residual: ‖R‖/γ there: the size of F, without a set.
      scale: what to compare that with: the change of F when y changes by its own size.
      move: the Newton step that is left.
    """

    y: Array
    residual: Array
    scale: Array
    move: Array


def find_root(operator: Operator, project: Operator | None, start: Array) -> Root:
    """A root of an operator on a set.

    Args:
      operator: F.
      project: Π; None for all of space.
      start: where to begin.
    """
    if project is not None or start.size > DENSE:
        return _search(operator, project or (lambda y: y), start)

    def search(units: Array, y: Array) -> Root:
        found = _search(lambda scaled: units * operator(units * scaled), lambda y: y, y / units)
        return found._replace(y=units * found.y, move=units * found.move)

    def again(_: Any, root: Root) -> Root:
        return search(1 / unit_diagonal(jax.jacfwd(operator)(root.y))[1], root.y)

    nowhere = jnp.full((), jnp.nan, start.dtype)
    return jax.lax.fori_loop(0, 2, again, Root(start, nowhere, nowhere, start))


def _search(operator: Operator, onto: Operator, start: Array) -> Root:
    start = onto(start)
    rounding = _ROUNDING * float(jnp.finfo(start.dtype).eps)
    gamma = 1 / _or_one(largest_derivative(operator, start))

    def residual(y: Array) -> Array:
        return y - onto(y - gamma * operator(y))

    def extragradient(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, length = carry
        half = onto(y - length * gamma * operator(y))
        then = onto(y - length * gamma * operator(half))
        # ‖R‖ never grows where the step is right; F may be much steeper away from the start.
        good = jnp.linalg.norm(residual(then)) <= (1 + rounding) * jnp.linalg.norm(residual(y))
        return jnp.where(good, then, y), jnp.where(good, length, length / 2)

    def newton(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        y, length, count, _ = carry
        now = residual(y)
        moved = onto(y - length * _solved(residual, y, now))
        better = jnp.linalg.norm(residual(moved)) < jnp.linalg.norm(now)
        length = jnp.where(better, jnp.minimum(2 * length, 1), length / 2)
        y = jnp.where(better, moved, y)
        going = jnp.linalg.norm(residual(y)) > gamma * rounding * change_scale(operator, y)
        return y, length, count + 1, going & (length > 0.5**_HALVINGS)

    y, _ = jax.lax.fori_loop(0, _FIRST, extragradient, (start, jnp.full((), 0.5, start.dtype)))
    begun = (y, jnp.ones((), y.dtype), jnp.zeros((), jnp.int32), jnp.ones((), bool))
    y = jax.lax.while_loop(lambda now: now[3] & (now[2] < _NEWTON), newton, begun)[0]
    left = residual(y)
    return Root(y, jnp.linalg.norm(left) / gamma, change_scale(operator, y), _solved(residual, y, left))


def find_crossing(slope: Operator, project: Operator | None, start: Array) -> tuple[Array, Array]:
    """Where an increasing function of one variable changes its sign, and how far that may be off.

    Bisection, which needs no derivative: y may optimise an f with kinks. If the function keeps its sign, the
    end of the set in that direction is returned; infinity for all of space.
    """
    onto = project or (lambda y: y)
    unit = jnp.maximum(jnp.abs(start), 1.0)

    def widen(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, width = carry
        low = jnp.where(slope(onto(low)) > 0, start - width, low)
        high = jnp.where(slope(onto(high)) < 0, start + width, high)
        return low, high, 2 * width

    def open_ended(carry: tuple[Array, Array, Array]) -> Array:
        low, high, width = carry
        outside = (slope(onto(low)) > 0) & (onto(low) == low) | (slope(onto(high)) < 0) & (onto(high) == high)
        return jnp.all(outside & jnp.isfinite(width))

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) / 2
        rising = slope(middle) > 0
        return jnp.where(rising, low, middle), jnp.where(rising, middle, high)

    low, high, _ = jax.lax.while_loop(open_ended, widen, (start, start, unit * 1e-3))
    low, high = jax.lax.fori_loop(0, _BISECTIONS, halve, (onto(low), onto(high)))
    return low + (high - low) / 2, jnp.linalg.norm(high - low)


def change_scale(operator: Operator, y: Array) -> Array:
    """By how much an operator changes when y changes by its own size, or by one."""
    push = jax.linearize(operator, y)[1]
    return jnp.linalg.norm(push(y)) + jnp.linalg.norm(push(jnp.full_like(y, y.size**-0.5)))


def largest_derivative(operator: Operator, at: Array) -> Array:
    """The size of the derivative of an operator: a power iteration."""
    push = jax.linearize(operator, at)[1]

    def turn(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        image = push(carry[0])
        size = jnp.linalg.norm(image)
        return image / _or_one(size), jnp.maximum(size, 0.9 * carry[1])

    first = jax.random.normal(jax.random.key(0), at.shape, at.dtype)
    return jax.lax.fori_loop(0, _POWER, turn, (first / jnp.linalg.norm(first), jnp.zeros((), at.dtype)))[1]


def _solved(residual: Operator, y: Array, right: Array) -> Array:
    """The Newton step of R at y."""
    return solved_system(residual, y, right, 1e-6)


def solved_system(operator: Operator, y: Array, right: Array, tolerance: float) -> Array:
    """The inverse of an operator's derivative at y, times a vector."""
    if y.size <= DENSE:
        scaled, scales = unit_diagonal(jax.jacfwd(operator)(y))
        return one_by_one(jnp.linalg.solve)(scaled, right / scales) / scales
    push = jax.linearize(operator, y)[1]
    return gmres(push, right, tol=tolerance, restart=50, maxiter=20)[0]


def _or_one(size: Array) -> Array:
    return jnp.where(size > 0, size, 1)
