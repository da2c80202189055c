"""A lower problem of many variables, without a matrix: L-BFGS, then Newton steps by conjugate gradients.

Both work in variables in which the diagonal of the Hessian is one, so that the entries of y may have very
different units. The systems of Newton's method end where they meet negative curvature, so that a g that is
convex near its minimum only, as a network's, is followed down to it. The work is counted, because blocks
that are solved at once take as long as the hardest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

USUAL, _MOST = 1000, 4000  # passes over the rows: the usual number, and after how many no Newton step begins
_QUASI_NEWTON_STEPS, _QUASI_NEWTON_SHARE = 100, 1e-4
_HALVINGS = 12
_FALLS = 1e-4  # the share of the predicted decrease by which a value must fall
_CG_STEPS, _CG_SHARE = 300, 1e-3
_CG_ENOUGH = 0.03  # what may be left of a right-hand side
_PROBES, _ROUNDS = 8, 4
_SHARE = 0.05  # the least entry of the diagonal, as a share of the size of its row
_SLOPE, _PRODUCT = 3.0, 3.0  # passes that a gradient, and a product with a Hessian take

Value = Callable[[Array], Array]


class Found(NamedTuple):
    """A lower problem after solving it.

    Attributes:
      y: the minimiser.
      move: the Newton step that is left; NaN where its system could not be solved, or g is not convex.
      inverse: multiplies a vector by [∇²_yy g]⁻¹.
      passes: how many passes over the rows it took.
    """

    y: Array
    move: Array
    inverse: Callable[[Array], Array]
    passes: Array


class System(NamedTuple):
    """What conjugate gradients have found.

    Attributes:
      solution: of the system, or as far as the curvature was positive.
      solved: whether it is one.
      products: how many were taken with the matrix.
    """

    solution: Array
    solved: Array
    products: Array


def solve_matrix_free(value: Value, start: Array) -> Found:
    """The minimiser of a function that is convex near it.

    Args:
      value: g as a function of a vector.
      start: where to begin.
    """
    scales = _scales(value, start)

    def scaled(at: Array) -> Array:
        return value(at / scales)

    found, passes = _newton(scaled, *_quasi_newton(scaled, start * scales))
    slope, product = jax.linearize(jax.grad(scaled), found)
    last = conjugate_gradients(product, slope)

    def inverse(right: Array) -> Array:
        return conjugate_gradients(product, right / scales).solution / scales

    passes += 2 * _PRODUCT * (last.products + _PROBES * _ROUNDS)  # the inverse is as much
    return Found(found / scales, jnp.where(last.solved, last.solution / scales, jnp.nan), inverse, passes)


def roots(diagonal: Array) -> Array:
    """The roots of a diagonal by size; where it is zero, that of its largest entry, or one.

    Entries may differ by any factor: a strength that has grown to e⁷⁰ must not change the units of others.
    """
    diagonal = jnp.abs(diagonal)
    largest = jnp.max(diagonal)
    return jnp.sqrt(jnp.where(diagonal > 0, diagonal, jnp.where(largest > 0, largest, 1)))


def conjugate_gradients(product: Callable[[Array], Array], right: Array) -> System:
    """Solves a system, up to where its matrix turns out not to be positive definite."""
    size = jnp.vdot(right, right)

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        solution, left, way, now, count, _ = carry
        pushed = product(way)
        curvature = jnp.vdot(way, pushed)
        positive = curvature > 0
        length = now / jnp.where(positive, curvature, 1)
        # Where already the first direction has no curvature, it is followed as far as it is long.
        length = jnp.where(positive, length, jnp.where(count == 0, 1, 0).astype(length.dtype))
        solution, left = solution + length * way, left - length * pushed
        then = jnp.vdot(left, left)
        way = left + then / jnp.where(now > 0, now, 1) * way
        return solution, left, way, then, count + 1, positive

    def going(carry: tuple[Array, ...]) -> Array:
        _, _, _, now, count, positive = carry
        return positive & (count < _CG_STEPS) & (now > _CG_SHARE**2 * size)

    none = jnp.zeros_like(right)
    begun = (none, right, right, size, jnp.zeros((), jnp.int32), jnp.ones((), bool))
    solution, _, _, left, count, positive = jax.lax.while_loop(going, step, begun)
    # Where g has no minimum, y runs off until squares overflow, and nothing is known any more.
    solved = positive & jnp.isfinite(size) & (left <= _CG_ENOUGH**2 * size)
    return System(solution, solved, count)


def _newton(value: Value, start: Array, passes: Array) -> tuple[Array, Array]:
    """Newton steps that are halved until the value falls, and how many passes were made by then."""
    fine = float(jnp.finfo(start.dtype).eps)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at, passes, _ = carry
        slope, product = jax.linearize(jax.grad(value), at)
        system, now = conjugate_gradients(product, slope), value(at)
        gain = jnp.vdot(slope, system.solution)

        def falls(length: Array) -> Array:
            return value(at - length * system.solution) <= now - _FALLS * length * gain

        def too_long(tried: tuple[Array, Array, Array]) -> Array:
            return ~tried[2] & (tried[1] < _HALVINGS)

        def shorter(tried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return tried[0] / 2, tried[1] + 1, falls(tried[0] / 2)

        whole = jnp.ones((), at.dtype)
        length, halvings, good = jax.lax.while_loop(too_long, shorter, (whole, jnp.int32(0), falls(whole)))
        # Near the minimum the value has no digits left to fall; the gradient still has.
        tiny = gain <= 16 * fine * jnp.abs(now)
        after = at - jnp.where(good, length, 1) * system.solution
        settles = tiny & (2 * jnp.linalg.norm(jax.grad(value)(after)) < jnp.linalg.norm(slope))
        good = jnp.isfinite(value(after)) & (good | settles)
        passes += 2 * _SLOPE + _PRODUCT * system.products + halvings
        return jnp.where(good, after, at), passes, good & ~tiny

    begun = (start, passes, jnp.ones((), bool))
    return jax.lax.while_loop(lambda now: now[2] & (now[1] < _MOST), step, begun)[:2]


def _scales(value: Value, at: Array) -> Array:
    """The roots of the diagonal of the Hessian, from products with random signs.

    A product mixes entry i with all others. So the first estimate is rough where their units are very
    different; those that follow look at variables that are already scaled.
    """
    product = jax.linearize(jax.grad(value), at)[1]

    def improve(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        key, scales = carry
        key, draw = jax.random.split(key)
        signs = jax.random.rademacher(draw, (_PROBES, at.size), at.dtype)
        found = signs * jax.lax.map(lambda sign: product(sign / scales) / scales, signs)
        diagonal = jnp.maximum(jnp.mean(found, 0), _SHARE * jnp.sqrt(jnp.mean(jnp.square(found), 0)))
        return key, scales * roots(diagonal)

    return jax.lax.fori_loop(0, _ROUNDS, improve, (jax.random.key(0), jnp.ones_like(at)))[1]


def _quasi_newton(value: Value, start: Array) -> tuple[Array, Array]:
    """A point near the minimum, by L-BFGS, and how many passes it took."""
    solver = optax.lbfgs()
    both = optax.value_and_grad_from_state(value)
    enough = _QUASI_NEWTON_SHARE * jnp.linalg.norm(jax.grad(value)(start))

    def step(carry: Any) -> Any:
        at, state, passes, count, _ = carry
        f, gradient = both(at, state=state)
        moves, state = solver.update(gradient, state, at, value=f, grad=gradient, value_fn=value)
        after: Any = optax.apply_updates(at, moves)
        after = jnp.where(jnp.isfinite(value(after)), after, at)
        tries: Any = optax.tree_utils.tree_get(state, "num_linesearch_steps")
        return after, state, passes + _SLOPE * tries, count + 1, jnp.linalg.norm(gradient) > enough

    none = jnp.zeros((), jnp.int32)
    going: Any = (start, solver.init(start), jnp.zeros(()), none, jnp.ones((), bool))
    found = jax.lax.while_loop(lambda now: now[4] & (now[3] < _QUASI_NEWTON_STEPS), step, going)
    return found[0], found[2]
