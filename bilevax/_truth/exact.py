"""All blocks on all rows, a group of blocks at a time: lower solutions, linear systems and means.

Argmin levels of few variables are minimised by damped Newton steps; larger ones by BFGS, finished by Newton's
method. Their Hessians are factorised if they are small, and used through Hessian-vector products otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.levels import Level
from bilevax._problem.problem import Problem
from bilevax._problem.reading import readers
from bilevax._problem.risk import overall
from bilevax._problem.sampling import Sample, Sampler, all_rows
from bilevax._problem.view import BlockView, each_block
from bilevax._step.lagrangian import Point, gradients, upper_gradients, with_terms
from bilevax._step.linear_algebra import one_by_one, solve_one
from bilevax._step.slots import gather
from bilevax._truth.lower_solve import SMALL, solve_lower_problem, unit_diagonal
from bilevax._truth.own_solve import Minimised, own_levels, solve_own
from bilevax._truth.saddle_solve import indefinite_inverse, solve_saddle
from bilevax._truth.set_solve import multiplier_within, projection, solve_within
from bilevax._util.trees import PyTree, combine, norm, result_dtype, zeros_like

_DENSE = 512  # the largest d_y whose Hessians are formed
_NUMBERS = 2**25  # about how many entries of intermediate results a group of blocks may take
_MOST_BLOCKS = 256  # in a group: all of them iterate until the last one is solved
_NEWTON_STEPS, _POLISHING_STEPS = 100, 20


class Accuracy(eqx.Module):
    """How accurately to solve, and how many blocks at once: all static, so that it is compiled once."""

    tolerance: float
    max_steps: int
    group: int


def libraries() -> tuple[Any, Any]:
    """optimistix and lineax, which only the diagnostics need."""
    try:
        import lineax
        import optimistix
    except ImportError as error:
        raise ImportError(
            'bilevax.diagnostics needs optimistix and lineax: pip install "bilevax[diagnostics]"'
        ) from error
    return optimistix, lineax


def group_size(problem: Problem, sampler: Sampler, y: dict[str, PyTree]) -> int:
    """How many blocks to look at together, from the size of their rows and Hessians."""
    sample = sampler.one_block(problem, None)
    size = max(sum(leaf.size for leaf in jax.tree.leaves(level)) for level in y.values()) // problem.count
    directions = size if size <= _DENSE else 1
    most = 1
    for batch in (sample.upper, *sample.lower.values()):
        leaves = jax.tree.leaves(batch.rows)
        own = 0 if batch.shared else sum(leaf.size for leaf in leaves)
        count = max((leaf.shape[0 if batch.shared else 1] for leaf in leaves), default=1)
        most = max(most, own + count * directions + size * directions)
    return max(1, min(_MOST_BLOCKS, _NUMBERS // most))


def solved(problem: Problem, x: PyTree, start: dict[str, PyTree], plan: Accuracy) -> dict[str, PyTree]:
    """y(x) by level, checked."""
    found = _solve(problem, x, start, plan)
    return _checked(found, problem, plan, "was not solved: ‖∇_y {}‖", "another y0, more max_steps")


def inverted(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: Accuracy) -> dict[str, PyTree]:
    """v(x, y) by level, checked."""
    found = _invert(problem, x, y, plan)
    what = "has a Hessian that was not inverted: ‖∇²_yy {} v − ∇_y f‖"
    return _checked(found, problem, plan, what, "float64")


@eqx.filter_jit
def upper_mean(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: Accuracy) -> Array:
    """The mean over the blocks of f_i(x, y_i), or their risk."""
    return overall(problem.risk, _upper_values(problem, x, y, plan))


def _upper_values(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: Accuracy) -> Array:
    """f_i(x, y_i) of every block."""

    def look(sample: Sample, y: dict[str, PyTree]) -> Array:
        return each_block(problem, x, sample, lambda view, y: view.f(y), y)

    return _in_groups(problem, plan, look, y)


@eqx.filter_jit
def lower_slopes(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: Accuracy) -> dict[str, PyTree]:
    """−∇_y g_i of every block for an argmin level, c_i for a mean level, at the y that they read.

    For variables that optimise f it is ∇_y f_i. On a set it is the step that is left, y − Π(y − ∇_y g_i).
    """

    def look(sample: Sample, y: dict[str, PyTree]) -> dict[str, PyTree]:
        seen = gradients(problem, Point(x, y), zeros_like(y), sample)
        own = {n: _left_on_set(level, y[n], seen.y[n]) for n, level in problem.levels.items() if level.own}
        confined = [n for n, level in problem.levels.items() if level.has_hessian and level.is_bounded]
        held = {n: _left_on_set(problem.levels[n], y[n], combine((-1, seen.v[n]))) for n in confined}
        return seen.v | own | held

    return _in_groups(problem, plan, look, y)


@eqx.filter_jit
def mean_gradient(
    problem: Problem, x: PyTree, y: dict[str, PyTree], v: dict[str, PyTree], plan: Accuracy
) -> PyTree:
    """The mean of ∂ℓ/∂x over all blocks, weighed under a risk, without a gradient in x per block."""
    sampler = all_rows(problem)
    weights = None if problem.risk is None else problem.risk.weights_of(_upper_values(problem, x, y, plan))
    groups, rest = divmod(problem.count, plan.group)

    def look(blocks: Array, total: PyTree) -> PyTree:
        sample = sampler.visit(problem, blocks, sampler.random, None)
        point = Point(x, gather(y, blocks), None if weights is None else weights[blocks])
        seen = gradients(problem, point, gather(v, blocks), sample)
        return combine((1, total), (blocks.shape[0] / problem.count, seen.x))

    def whole(number: Array, total: PyTree) -> PyTree:
        return look(number * plan.group + jnp.arange(plan.group), total)

    total = jax.lax.fori_loop(0, groups, whole, zeros_like(x))
    return look(jnp.arange(problem.count - rest, problem.count), total) if rest else total


def _in_groups(problem: Problem, plan: Accuracy, look: Callable[..., PyTree], y: dict[str, PyTree]) -> PyTree:
    """look(sample, y) on one group of blocks after the other, stacked over all blocks."""
    sampler = all_rows(problem)
    groups = -(-problem.count // plan.group)
    # The last group is filled up with the last block, so that all groups are one compiled loop.
    blocks = jnp.minimum(jnp.arange(groups * plan.group), problem.count - 1).reshape(groups, plan.group)

    def visit(blocks: Array) -> PyTree:
        return look(sampler.visit(problem, blocks, sampler.random, None), gather(y, blocks))

    out = jax.lax.map(visit, blocks)
    return jax.tree.map(lambda a: jnp.reshape(a, (-1, *a.shape[2:]))[: problem.count], out)


def _checked(
    found: dict[str, Any], problem: Problem, plan: Accuracy, what: str, remedy: str
) -> dict[str, PyTree]:
    """The solutions by level; raises if the residual of a block exceeds its bound or is not finite."""
    for name, (_, sizes) in found.items():
        residual, scale = (np.asarray(size, np.float64) for size in sizes)
        bad = ~(residual <= plan.tolerance * scale)
        if not bad.any():
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.where(bad, np.nan_to_num(residual / scale, nan=np.inf), -1.0)
        worst = int(np.argmax(excess))
        level = problem.levels[name]
        what = what.format("f" if level.own else "g")
        raise RuntimeError(
            f"lower level {name!r} of block {worst} {what} = {residual[worst]:.3g}, expected at most "
            f"{plan.tolerance * scale[worst]:.3g} (tolerance {plan.tolerance:g} × scale {scale[worst]:.3g}). "
            f"{bad.sum()} of {bad.size} blocks failed, this one by most. {level.assumption}; if "
            f"it is, try {remedy} or a larger tolerance"
        )
    return {name: value for name, (value, _) in found.items()}


@eqx.filter_jit
def _solve(problem: Problem, x: PyTree, start: dict[str, PyTree], plan: Accuracy) -> dict[str, Any]:
    """By level y(x), and per block ‖∇_y g‖ and the scale to compare it with."""

    def one(view: BlockView, y: dict[str, PyTree]) -> dict[str, Any]:
        own = own_levels(view)
        found: dict[str, Any] = {}
        best: dict[str, PyTree] = {}
        for name in (name for name in problem.order if name not in own):
            found[name] = _solve_one(view, name, y[name], best, plan)
            best[name] = found[name][0]
        if own:
            optimum = solve_own(
                view, best, {n: y[n] for n in own}, lambda value, flat: _own_minimum(value, flat, plan)
            )
            found |= {name: (optimum.y[name], (optimum.residual, optimum.scale)) for name in own}
        return found

    return _in_groups(problem, plan, lambda sample, y: each_block(problem, x, sample, one, y), start)


def _solve_one(
    view: BlockView, name: str, y: PyTree, others: dict[str, PyTree], plan: Accuracy
) -> tuple[PyTree, tuple[Array, Array]]:
    if not view.problem.levels[name].has_hessian:
        return view.c(name, others), _exact(view.x)
    flat, unravel = ravel_pytree(y)

    def value(flat: Array) -> Array:
        return view.g(name, unravel(flat), others)

    if view.problem.levels[name].sign == 0:
        found = solve_saddle(view, name, y, others)
        residual = jnp.where(found.good, found.residual, jnp.nan)
        return unravel(found.y), (residual, found.scale)
    if view.problem.levels[name].is_bounded:
        inside = solve_within(value, projection(view, name, y), flat)
        residual = jnp.where(inside.good, inside.residual, jnp.nan)
        return unravel(inside.y), (residual, inside.scale)
    flat, sizes = _minimise(value, flat, plan)
    return unravel(flat), sizes


@eqx.filter_jit
def _invert(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: Accuracy) -> dict[str, Any]:
    """By level v = [∇²_yy g]⁻¹ ∇_y f, and per block ‖∇²_yy g v − ∇_y f‖ and the scale to compare it with."""

    def one(view: BlockView, y: dict[str, PyTree], by_y: dict[str, PyTree]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in reversed(problem.order):
            v = {other: found[other][0] for other in readers(problem.levels, name)}
            found[name] = _invert_one(view, name, y, with_terms(view, name, y, by_y[name], v), plan)
        return found

    def look(sample: Sample, y: dict[str, PyTree]) -> dict[str, Any]:
        return each_block(problem, x, sample, one, y, upper_gradients(problem, Point(x, y), sample))

    return _in_groups(problem, plan, look, y)


def _invert_one(
    view: BlockView, name: str, y: dict[str, PyTree], by_y: PyTree, plan: Accuracy
) -> tuple[PyTree, tuple[Array, Array]]:
    if not view.problem.levels[name].has_hessian:  # variables that optimise f have no multiplier
        return by_y, _exact(view.x)
    flat, unravel = ravel_pytree(y[name])
    right = ravel_pytree(by_y)[0]

    def value(flat: Array) -> Array:
        return view.g(name, unravel(flat), y)

    gradient = jax.grad(value)
    _, push = jax.linearize(gradient, flat)
    if view.problem.levels[name].is_bounded:
        v, left = multiplier_within(value, projection(view, name, y[name]), flat, right)
    else:
        indefinite = view.problem.levels[name].sign == 0
        v = indefinite_inverse(gradient, flat)(right) if indefinite else _system(gradient, flat, right, plan)
        left = push(v) - right
    return unravel(v), (norm(left), norm(right) + norm(push(_unit(v))) * norm(v))


def _own_minimum(value: Callable[[Array], Array], start: Array, plan: Accuracy) -> Minimised:
    found, (residual, scale) = _minimise(value, start, plan)
    return Minimised(found, residual, scale, residual)


def _minimise(
    value: Callable[[Array], Array], start: Array, plan: Accuracy
) -> tuple[Array, tuple[Array, Array]]:
    """The minimiser of one block's g, its ‖∇g‖ and the scale of that."""
    gradient = jax.grad(value)
    y = solve_lower_problem(value, start).y if start.size <= SMALL else _quasi_newton(value, start, plan)
    slope, push = jax.linearize(gradient, y)
    good = jnp.isfinite(value(y)) & _is_convex(gradient, y)
    return y, (jnp.where(good, norm(slope), jnp.nan), norm(push(y)) + norm(push(_unit(y))))


def _quasi_newton(value: Callable[[Array], Array], start: Array, plan: Accuracy) -> Array:
    """The minimiser of a g of many variables: BFGS, and then Newton's method."""
    optimistix, _ = libraries()
    gradient = jax.grad(value)

    def measure(y: Array) -> tuple[Array, Array, Array]:
        slope, push = jax.linearize(gradient, y)
        return slope, norm(slope), norm(push(y)) + norm(push(_unit(y)))

    coarse = min(1e-3, plan.tolerance**0.5)
    method = optimistix.BFGS if start.size <= _DENSE else optimistix.LBFGS
    found = optimistix.minimise(
        lambda y, _: value(y), method(rtol=coarse, atol=coarse), start, max_steps=plan.max_steps, throw=False
    ).value
    found = jnp.where(jnp.all(jnp.isfinite(found)), found, start)

    # Newton's method, halving a step that does not lower ‖∇g‖, down to rounding.
    fine = max(1e-3 * plan.tolerance, 20 * float(jnp.finfo(start.dtype).eps))

    def unfinished(carry: Any) -> Array:
        _, (_, size, scale), length, count = carry
        shortest = jnp.where(size > plan.tolerance * scale, 1e-9, 1e-3)
        return (size > fine * scale) & (length > shortest) & (count < _NEWTON_STEPS)

    def newton(carry: Any) -> Any:
        y, now, length, count = carry
        moved = y - length * _system(gradient, y, now[0], plan)
        then = measure(moved)
        better = then[1] < now[1]
        y, now = jax.tree.map(lambda new, old: jnp.where(better, new, old), (moved, then), (y, now))
        return y, now, jnp.where(better, jnp.minimum(2 * length, 1), length / 2), count + 1

    carry = (found, measure(found), jnp.ones((), start.dtype), jnp.zeros((), jnp.int32))
    y = jax.lax.while_loop(unfinished, newton, carry)[0]
    return _polished(gradient, y, plan) if start.size <= _DENSE else y


def _polished(gradient: Callable[[Array], Array], y: Array, plan: Accuracy) -> Array:
    """Further Newton steps, while each leaves at most half of what was left, in the norm of the Hessian.

    ‖∇g‖ hardly sees directions in which g is nearly flat; this norm weighs all directions alike.
    """

    def step(y: Array) -> tuple[Array, Array]:
        slope = gradient(y)
        move = _system(gradient, y, slope, plan)
        return move, jnp.vdot(slope, move)

    def going(carry: Any) -> Array:
        return carry[2] & (carry[3] < _POLISHING_STEPS)

    def polish(carry: Any) -> Any:
        y, (move, left), _, count = carry
        then = step(y - move)
        better = (then[1] >= 0) & (then[1] <= left / 4)
        new, old = (y - move, then), (y, (move, left))
        y, now = jax.tree.map(lambda new, old: jnp.where(better, new, old), new, old)
        return y, now, better, count + 1

    first = step(y)
    return jax.lax.while_loop(going, polish, (y, first, first[1] > 0, jnp.zeros((), jnp.int32)))[0]


def _is_convex(gradient: Callable[[Array], Array], y: Array) -> Array:
    """Whether ∇²g(y) is positive definite: at a saddle point y is no solution."""
    rounding = 100 * float(jnp.finfo(y.dtype).eps)
    if y.size <= _DENSE:
        hessian = jax.jacfwd(gradient)(y)
        shifted = (hessian + hessian.T) / 2 + rounding * jnp.max(jnp.abs(hessian)) * jnp.eye(
            y.size, dtype=y.dtype
        )
        return jnp.all(jnp.isfinite(one_by_one(jnp.linalg.cholesky)(shifted)))
    _, push = jax.linearize(gradient, y)
    largest = _power(push, y)
    return _power(lambda v: largest * v - push(v), y) <= (1 + 1e-3) * largest


def _power(push: Callable[[Array], Array], like: Array, turns: int = 30) -> Array:
    """The largest eigenvalue, by size, of a symmetric map."""
    start = jax.random.normal(jax.random.key(0), like.shape, like.dtype)

    def turn(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        image = push(carry[0])
        size = norm(image)
        return image / _or_one(size), size

    return jax.lax.fori_loop(0, turns, turn, (start / norm(start), jnp.zeros((), like.dtype)))[1]


def _system(gradient: Callable[[Array], Array], y: Array, right: Array, plan: Accuracy) -> Array:
    """[∇²g(y)]⁻¹ right: by a Cholesky factorisation if it is small, else by conjugate gradients.

    The factorisation is that of the matrix with ones on its diagonal: entries of y may differ in their units.
    """
    if y.size <= _DENSE:
        scaled, scales = unit_diagonal(jax.jacfwd(gradient)(y))
        return one_by_one(solve_one)(scaled, (right / scales)[:, None])[:, 0] / scales
    _, lineax = libraries()
    _, push = jax.linearize(gradient, y)
    size = _or_one(norm(right))
    unit = right / size
    # lineax treats curvatures below 100 d ε as zero, which is not small in float32: so they are scaled up.
    boost = 1e6 / _or_one(norm(push(unit)))
    operator = lineax.FunctionLinearOperator(
        lambda v: boost * push(v), jax.ShapeDtypeStruct(y.shape, y.dtype), lineax.positive_semidefinite_tag
    )
    fine = max(1e-2 * plan.tolerance, 20 * float(jnp.finfo(y.dtype).eps))
    method = lineax.CG(rtol=fine, atol=fine, norm=norm)
    return size * boost * lineax.linear_solve(operator, unit, method, throw=False).value


def _left_on_set(level: Level, y: PyTree, slope: PyTree) -> PyTree:
    if not level.is_bounded:
        return slope
    return combine((1, y), (-1, level.bounded(combine((1, y), (-1, level.signed(slope))))))


def _exact(x: PyTree) -> tuple[Array, Array]:
    """The residual, and its scale, of a level that is evaluated and not solved."""
    zero = jnp.zeros((), result_dtype(x))
    return zero, zero


def _unit(like: Array) -> Array:
    return jnp.full_like(like, like.size**-0.5)


def _or_one(size: Array) -> Array:
    return jnp.where(size > 0, size, 1)
