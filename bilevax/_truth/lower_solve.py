"""One lower problem, solved in a compiled program.

Problems of few variables are solved by damped Newton steps with a dense Hessian, in variables in which its
diagonal is one; larger ones without a matrix (`matrix_free`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bilevax._step.linear_algebra import one_by_one
from bilevax._truth.matrix_free import USUAL, roots, solve_matrix_free

SMALL = 64  # variables, up to which the Hessian is a matrix
USUAL_STEPS = 8  # of Newton, or as much work
_STEPS = 200  # damped Newton steps
_STEPS_WITHIN = 300  # from a far start: where f or g is an exponential, each is a unit of its exponent
_MOST_DAMPING_WITHIN = 1e30  # of a curvature that is nearly none, as that of an exponential far below zero
_DAMPING, _CHANGE, _MOST_DAMPING, _LOST_DAMPING = 1e-3, 10.0, 1e12, 1e-2
_SOLVED = 1e-6  # of the gain of a tiny step, which may be left after it
_SETTLES = 0.02  # of what a step is predicted to gain, which may be left after it where only slopes can tell
_AS_PREDICTED = 0.5  # of the decrease that the parabola predicts: less, and a shorter step would do better
_FAR = 1e6  # times the size of a start, or one: beyond that nothing was found

Value = Callable[[Array], Array]


class Solved(NamedTuple):
    """A lower problem after solving it.

    Attributes:
      y: the minimiser.
      move: the Newton step that is left; NaN where even its system could not be solved.
      inverse: multiplies a vector by [∇²_yy g]⁻¹.
      steps: how many Newton steps were taken, or as much work; as many as is usual where it is not counted.
    """

    y: Array
    move: Array
    inverse: Callable[[Array], Array]
    steps: Array | int = USUAL_STEPS


def solve_lower_problem(value: Value, start: Array) -> Solved:
    """The minimiser of a strongly convex function.

    Args:
      value: g as a function of a vector.
      start: where to begin.
    """
    return (_dense if start.size <= SMALL else _matrix_free)(value, start)


def _dense(value: Value, start: Array) -> Solved:
    """Newton steps, with damping that grows where a step would not lower the value (Levenberg)."""
    rounding = 4 * float(jnp.finfo(start.dtype).eps)
    both = jax.value_and_grad(value)

    def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        at, damping, count, _ = carry
        now, gradient = both(at)
        inverse = _inverse(value, at, damping)
        move = inverse(gradient)
        after = at - move
        then, left = both(after)
        # Near the minimum the value has no digits left to fall; the gradient still has.
        remains = jnp.vdot(left, inverse(left))
        predicted = jnp.vdot(gradient, move) / 2
        falls = (then <= now + rounding * jnp.abs(now)) & ((then < now) | (remains < 2 * predicted))
        # Where large terms cancel in the value, it has no digits at all, and the gradient alone can tell.
        settles = (remains < _SETTLES * predicted) & (jnp.abs(jnp.vdot(left, move)) < predicted)
        good = jnp.isfinite(then) & (falls | settles)
        # Where less is to be gained than the value has digits for, a step that leaves more than a part of the
        # gradient was rounding, and a few failures show that nothing is left.
        tiny = 2 * predicted <= rounding * jnp.abs(now)
        nothing_left = (remains > predicted / 2) | (remains < _SOLVED * predicted)
        enough = good & ((2 * predicted <= rounding**2 * jnp.abs(now)) | (tiny & nothing_left))
        # Where the curvature changes on the way (a robust loss far from its corner), a step that lowers the
        # value a little does not mean that a longer one would.
        as_predicted = now - then >= _AS_PREDICTED * predicted - rounding * jnp.abs(now)
        damping = jnp.where(good & as_predicted, damping / _CHANGE, damping)
        damping = jnp.where(good, damping, jnp.maximum(damping * _CHANGE, _DAMPING))
        going = ~enough & (damping < jnp.where(tiny & ~good, _LOST_DAMPING, _MOST_DAMPING))
        return jnp.where(good, after, at), jnp.maximum(damping, rounding), count + 1, going

    begun = (start, jnp.full((), rounding, start.dtype), jnp.zeros((), jnp.int32), jnp.ones((), bool))
    found, _, taken, _ = jax.lax.while_loop(lambda now: now[3] & (now[2] < _STEPS), step, begun)
    inverse = _inverse(value, found, jnp.full((), rounding, start.dtype))
    return Solved(found, inverse(jax.grad(value)(found)), inverse, taken)


def descend_within(value: Value, project: Callable[[Array], Array], start: Array) -> Array:
    """A point of a set near the minimum of a function there, from a start that may be far.

    Damped Newton steps as in `_dense`, of the entries that no bound holds, each projected, and taken only if
    it lowers the value. Nothing is done where there are too many variables for a Hessian.
    """
    if start.size > SMALL:
        return start
    fine = float(jnp.finfo(start.dtype).eps)

    def step(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        at, damping, count, _ = carry
        gradient, hessian = jax.grad(value)(at), jax.hessian(value)(at)
        tried = gradient / roots(jnp.diagonal(hessian)) ** 2
        held = (project(at - tried) == at) & (gradient != 0)
        move = _inverted(_with_held(hessian, held), damping)(jnp.where(held, 0, gradient))
        now, after = value(at), project(at - move)
        better = value(after) < now
        tiny = jnp.vdot(gradient, move) <= fine * jnp.abs(now)
        going = ~(tiny & (damping <= 1)) & (damping < _MOST_DAMPING_WITHIN)
        damping = jnp.where(better, damping / _CHANGE, damping * _CHANGE)
        # What was needed where there was no curvature is too much where there is.
        damping = jnp.where(tiny, _DAMPING, damping)
        return jnp.where(better, after, at), jnp.maximum(damping, fine), count + 1, going

    begun = (project(start), jnp.full((), _DAMPING, start.dtype), jnp.zeros((), int), jnp.ones((), bool))
    found = jax.lax.while_loop(lambda now: now[3] & (now[2] < _STEPS_WITHIN), step, begun)[0]
    # Where there is no minimum, the way has no end.
    return jnp.where(jnp.max(jnp.abs(found)) < _FAR * (1 + jnp.max(jnp.abs(start))), found, start)


def _with_held(hessian: Array, held: Array) -> Array:
    """A Hessian in which some entries are not coupled to the others."""
    free = jnp.where(held, 0, 1).astype(hessian.dtype)
    return hessian * free[:, None] * free + jnp.diag(1 - free)


def _inverse(value: Value, at: Array, damping: Array) -> Callable[[Array], Array]:
    """The inverse of the Hessian with its diagonal scaled to one and then raised by the damping."""
    return _inverted(jax.hessian(value)(at), damping)


def _inverted(hessian: Array, damping: Array) -> Callable[[Array], Array]:
    scaled, scales = unit_diagonal(hessian)
    root = one_by_one(_inverse_root)((scaled + scaled.T) / 2, damping)
    return lambda right: (root @ (root.T @ (right / scales))) / scales


def _inverse_root(matrix: Array, damping: Array) -> Array:
    """R with R Rᵀ = (|A| + damping)⁻¹; in a loop over matrices, only indefinite ones are decomposed.

    A direction of negative curvature has no minimum: it is followed with the size of that curvature.
    """
    unit = jnp.eye(len(matrix), dtype=matrix.dtype)

    def factor(matrix: Array) -> Array:
        return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)

    def definite() -> Array:
        lower = factor(matrix + damping * unit)
        return jax.lax.linalg.triangular_solve(lower, unit, left_side=True, lower=True).T

    def indefinite() -> Array:
        values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
        return vectors / jnp.sqrt(jnp.abs(values) + damping)

    return jax.lax.cond(jnp.isfinite(factor(matrix)[-1, -1]), definite, indefinite)


def unit_diagonal(hessian: Array) -> tuple[Array, Array]:
    """A Hessian with ones on its diagonal, and the scales that it was divided by on both sides."""
    scales = roots(jnp.diagonal(hessian))
    return hessian / scales[:, None] / scales, scales


def _matrix_free(value: Value, start: Array) -> Solved:
    """As `solve_matrix_free`, with its work in Newton steps."""
    found = solve_matrix_free(value, start)
    steps = jnp.ceil(USUAL_STEPS * found.passes / USUAL).astype(jnp.int32)
    return Solved(found.y, found.move, found.inverse, steps)
