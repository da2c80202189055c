"""A few blocks solved on all their rows, to compare what a run tracks with the truth.

Unlike the diagnostics it needs no other library, and it does not ask for high accuracy: its errors must be
small beside those of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

from bilevax._problem.problem import Problem
from bilevax._problem.sampling import all_rows
from bilevax._problem.view import BlockView, each_block
from bilevax._util.trees import PyTree

_QUASI_NEWTON_STEPS, _QUASI_NEWTON_SHARE = 100, 1e-4
_NEWTON_STEPS = 3
_CG_STEPS, _CG_SHARE = 100, 1e-7
_ENTRIES = 2**22  # of the rows of all blocks that are solved at once


class Truth(NamedTuple):
    """Per block: f at the tracked y and at y(x), and how far y, and v if it is tracked, are off.

    Attributes:
      tracked: f_i(x, y_i).
      value: f_i(x, y_i(x)).
      y_error: ‖y_i − y_i(x)‖ / ‖y_i(x)‖, the largest of all levels.
      v_error: the same of v; NaN if no level tracks it.
      left: by how much f would change if another Newton step were taken: small if the block was solved.
    """

    tracked: Array
    value: Array
    y_error: Array
    v_error: Array
    left: Array


@eqx.filter_jit
def solve_few(
    problem: Problem, x: PyTree, y: dict[str, PyTree], v: dict[str, PyTree], blocks: Array
) -> Truth:
    """Solves some blocks at x.

    Args:
      problem: the problem.
      x: the upper variable.
      y: per level, the tracked variables of these blocks, from where they are solved.
      v: per level, their tracked multipliers, or None.
      blocks: the numbers of the blocks.
    """
    sampler = all_rows(problem)
    sample = sampler.visit(problem, blocks, sampler.random, None)

    def one(view: BlockView, y: dict[str, PyTree], v: dict[str, PyTree]) -> Truth:
        solved = {name: _lower(view, name, y[name]) for name in y}
        best = {name: found for name, (found, _) in solved.items()}
        by_y = jax.grad(view.f)(best)
        errors = [_relative(y[name], best[name]) for name in y]
        multipliers = [
            _relative(v[name], _multiplier(view, name, best[name], by_y[name]))
            for name in v
            if v[name] is not None
        ]
        v_error = jnp.max(jnp.stack(multipliers)) if multipliers else jnp.asarray(jnp.nan)
        left = sum(jnp.abs(jnp.vdot(ravel_pytree(by_y[name])[0], move)) for name, (_, move) in solved.items())
        return Truth(view.f(y), view.f(best), jnp.max(jnp.stack(errors)), v_error, jnp.asarray(left))

    return each_block(problem, x, sample, one, y, v)


def affordable_blocks(problem: Problem, most: int) -> int:
    """How many blocks can be solved at once at little cost, at most; 0 if one has too many rows."""
    shapes = all_rows(problem).one_block(problem, None, slots=False)
    entries = sum(
        leaf.size for batch in (shapes.upper, *shapes.lower.values()) for leaf in jax.tree.leaves(batch.rows)
    )
    return min(most, _ENTRIES // max(entries, 1))


def require_slot_per_block(problem: Problem, caller: str) -> None:
    """Raises if a lower level cannot be solved block by block."""
    for name, level in problem.levels.items():
        if level.slots is not None:
            raise ValueError(
                f"{caller} needs one slot per block, got the lower level {name!r} with slots of its own"
            )


def _lower(view: BlockView, name: str, y: PyTree) -> tuple[PyTree, Array]:
    """y(x) of one level, and the Newton step that is left."""
    if not view.problem.levels[name].has_hessian:
        found = view.c(name)
        return found, jnp.zeros_like(ravel_pytree(found)[0])
    flat, unravel = ravel_pytree(y)

    def value(flat: Array) -> Array:
        return view.g(name, unravel(flat))

    found = _newton(value, _quasi_newton(value, flat))
    return unravel(found), _newton_direction(value, found)


def _quasi_newton(value: Callable[[Array], Array], start: Array) -> Array:
    """A point near the minimum, by L-BFGS."""
    solver = optax.lbfgs()
    both = optax.value_and_grad_from_state(value)
    enough = _QUASI_NEWTON_SHARE * jnp.linalg.norm(jax.grad(value)(start))

    def step(carry: tuple[Array, Any, Array, Array]) -> tuple[Array, Any, Array, Array]:
        at, state, count, _ = carry
        f, gradient = both(at, state=state)
        moves, state = solver.update(gradient, state, at, value=f, grad=gradient, value_fn=value)
        after: Any = optax.apply_updates(at, moves)
        after = jnp.where(jnp.isfinite(value(after)), after, at)
        return after, state, count + 1, jnp.linalg.norm(gradient) > enough

    going = (start, solver.init(start), jnp.zeros((), jnp.int32), jnp.ones((), bool))
    return jax.lax.while_loop(lambda now: now[3] & (now[2] < _QUASI_NEWTON_STEPS), step, going)[0]


def _newton(value: Callable[[Array], Array], start: Array) -> Array:
    """A few Newton steps, each taken only if it does not increase the value."""

    def step(_: Any, at: Array) -> Array:
        after = at - _newton_direction(value, at)
        return jnp.where(value(after) <= value(at), after, at)

    return jax.lax.fori_loop(0, _NEWTON_STEPS, step, start)


def _newton_direction(value: Callable[[Array], Array], at: Array) -> Array:
    gradient, product = jax.linearize(jax.grad(value), at)
    return cg(product, gradient, tol=_CG_SHARE, maxiter=_CG_STEPS)[0]


def _multiplier(view: BlockView, name: str, y: PyTree, by_y: PyTree) -> PyTree:
    """[∇²_yy g]⁻¹ ∇_y f."""
    if not view.problem.levels[name].has_hessian:
        return by_y
    flat, unravel = ravel_pytree(y)
    product = jax.linearize(jax.grad(lambda flat: view.g(name, unravel(flat))), flat)[1]
    return unravel(cg(product, ravel_pytree(by_y)[0], tol=_CG_SHARE, maxiter=_CG_STEPS)[0])


def _relative(tracked: PyTree, true: PyTree) -> Array:
    tracked, true = ravel_pytree(tracked)[0], ravel_pytree(true)[0]
    size = jnp.linalg.norm(true)
    return jnp.linalg.norm(tracked - true) / jnp.where(size > 0, size, 1)
