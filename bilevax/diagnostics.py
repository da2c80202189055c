"""The truth, for problems small enough to be solved: y(x), F(x), ∇F(x), and how far a run is off.

Nothing here is sampled: every function goes over all blocks and all rows, a group of blocks at a time.
Argmin levels are minimised by BFGS and finished by Newton's method; their Hessians are factorised if
they are small, and seen through Hessian-vector products only if not. What was not solved to the
tolerance raises, and is never returned.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax import checks
from bilevax.lagrangian import Point, gradients, over_blocks, upper_gradients
from bilevax.memory import gather
from bilevax.problem import Argmin, Mean, Problem
from bilevax.rows import Batch
from bilevax.sampling import Sample, Sampler, make_sampler
from bilevax.solvers.start import checked_start
from bilevax.solvers.state import State
from bilevax.trees import PyTree, combine, norm, result_dtype, zeros_like

_DENSE = 512  # the largest d_y whose Hessians are formed
_NUMBERS = 2**25  # how many numbers of intermediate results a group of blocks may take, about
_NEWTON_STEPS = 100


class Residuals(eqx.Module):
    """How far a run is from the truth; each entry is a dict if the levels have names.

    Attributes:
      y: root mean square over the blocks of ‖y_i − y_i(x)‖.
      gradient: the same of ‖∇_y g_i(x, y_i)‖ (of ‖y_i − c_i(x)‖, for a mean level).
      v: the same of ‖v_i − [∇²_yy g_i]⁻¹ ∇_y f_i‖ at (x, y_i); None for a level that tracks no v.
    """

    y: PyTree
    gradient: PyTree
    v: PyTree


def solve_lower(
    problem: Problem,
    x: PyTree,
    y0: PyTree = None,
    *,
    tolerance: float | None = None,
    max_steps: int = 200,
    blocks_at_once: int | None = None,
) -> PyTree:
    r"""The exact lower solutions of all blocks, on all rows.

    .. math:: y_i(x) = \arg\min_y g_i(x, y), \quad\text{or}\quad y_i(x) = \mathbb{E}[c_i(x; \zeta)]

    A solution is accepted if :math:`\|\nabla_y g_i\| \le \text{tolerance} \cdot (\|\nabla_{yy}^2 g_i\, y_i\|
    + \|\nabla_{yy}^2 g_i\, u\|)` with the unit vector :math:`u = (1, \dots, 1)/\sqrt{d_y}`: the gradient is
    held against what it changes by when y changes by its own size or by one. Newton's method usually goes
    far below; the error of y itself may exceed the tolerance by the condition number of the Hessian.

    Not for use under `jax.jit`: the outcome is checked on the host. (It compiles itself, once per shape.)

    Args:
      problem: the problem; every lower level must have one slot per block.
      x: the upper variable.
      y0: where the solver starts, with leading axis m; a dict if the levels have names. What is given for
        a mean level is not used. An argmin level left None starts from zero, in the one shape of a single
        array that `lower` and `upper` accept: a vector as long as some axis of x, of the block constants
        or of the rows, or a number if no vector fits.
      tolerance: see above; left out, 1e-8 in float64 and 1e-4 in float32.
      max_steps: the most steps of BFGS per block, before Newton's method takes over.
      blocks_at_once: the most blocks solved together; left out, as many as keep the memory for
        intermediate results within some hundred MB.

    Returns:
      y with leading axis m; a dict if the levels have names. Its dtype is that of x.

    Raises:
      RuntimeError: if a block was not solved to the tolerance.
      ValueError: if the shape of y cannot be told without y0, or a level has its own slots.
      ImportError: if optimistix and lineax are missing.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp, numpy as np
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y**2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - block * x) ** 2),
      ...     blocks=jnp.arange(6.0).reshape(3, 2),
      ... )
      >>> print(np.asarray(bx.solve_lower(problem, jnp.ones(2))).round(3))
      [[0. 1.]
       [2. 3.]
       [4. 5.]]
    """
    x, start, plan = _prepare(problem, x, y0, tolerance, max_steps, blocks_at_once)
    return problem.view(_solved(problem, x, start, plan))


def objective(
    problem: Problem,
    x: PyTree,
    y0: PyTree = None,
    *,
    tolerance: float | None = None,
    max_steps: int = 200,
    blocks_at_once: int | None = None,
) -> Array:
    r"""The objective, at the exact lower solutions and on all rows.

    .. math:: F(x) = \frac1m \sum_i f_i(x, y_i(x))

    Args:
      problem: as in `solve_lower`, like all that follow.
      x: the upper variable.
      y0: where the lower solver starts.
      tolerance: of the lower solutions.
      max_steps: the most steps of BFGS per block.
      blocks_at_once: the most blocks looked at together.

    Returns:
      F(x), a scalar.

    Raises:
      RuntimeError, ValueError, ImportError: as `solve_lower`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y**2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - block * x) ** 2),
      ...     blocks=jnp.arange(6.0).reshape(3, 2),
      ... )
      >>> round(float(bx.objective(problem, jnp.ones(2))), 3)  # (0 + 1 + 4 + 9 + 16 + 25) / 3
      18.333
    """
    x, start, plan = _prepare(problem, x, y0, tolerance, max_steps, blocks_at_once)
    return _upper_mean(problem, x, _solved(problem, x, start, plan), plan)


def hypergradient(
    problem: Problem,
    x: PyTree,
    y0: PyTree = None,
    *,
    tolerance: float | None = None,
    max_steps: int = 200,
    blocks_at_once: int | None = None,
) -> PyTree:
    r"""The gradient of the objective, by implicit differentiation at the exact lower solutions.

    .. math::
        \nabla F(x) = \frac1m \sum_i \nabla_x f_i - \nabla_{xy}^2 g_i [\nabla_{yy}^2 g_i]^{-1} \nabla_y f_i

    with :math:`+ \nabla c_i(x)^\top \nabla_y f_i` for a mean level.

    Args:
      problem: as in `solve_lower`, like all that follow.
      x: the upper variable.
      y0: where the lower solver starts.
      tolerance: of the lower solutions, and of the linear systems.
      max_steps: the most steps of BFGS per block.
      blocks_at_once: the most blocks looked at together.

    Returns:
      ∇F(x), a pytree like x.

    Raises:
      RuntimeError: also if a Hessian could not be inverted to the tolerance.
      ValueError, ImportError: as `solve_lower`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp, numpy as np
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y**2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - block * x) ** 2),
      ...     blocks=jnp.arange(6.0).reshape(3, 2),
      ... )
      >>> print(np.asarray(bx.hypergradient(problem, jnp.ones(2))).round(3))  # 2 x · mean block²
      [13.333 23.333]
    """
    x, start, plan = _prepare(problem, x, y0, tolerance, max_steps, blocks_at_once)
    y = _solved(problem, x, start, plan)
    return _mean_gradient(problem, x, y, _inverted(problem, x, y, plan), plan)


def residuals(
    problem: Problem,
    state: State,
    *,
    tolerance: float | None = None,
    max_steps: int = 200,
    blocks_at_once: int | None = None,
) -> Residuals:
    r"""How far the lower variables of a run are from what they track.

    .. math:: \Big(\frac1m \sum_i \|y_i - y_i(x)\|^2\Big)^{1/2}

    and likewise of ∇_y g_i and of v_i; see `Residuals`.

    Args:
      problem: as in `solve_lower`.
      state: the state of a run, of any solver.
      tolerance: of the lower solutions, and of the linear systems.
      max_steps: the most steps of BFGS per block.
      blocks_at_once: the most blocks looked at together.

    Returns:
      The `Residuals`.

    Raises:
      RuntimeError, ValueError, ImportError: as `hypergradient`.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y**2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=3,
      ... )
      >>> solver = bx.BSVRBv2(upper_step=0.1)
      >>> state = solver.init(problem, jnp.ones(4), jnp.zeros((3, 4)), key=jax.random.key(0))
      >>> found = bx.residuals(problem, state)
      >>> [round(float(size), 3) for size in (found.y, found.gradient, found.v)]
      [2.0, 4.0, 0.0]
    """
    if not isinstance(state, State):
        raise TypeError(f"state must be the state of a run, got {type(state).__name__}")
    x, start, plan = _prepare(problem, state.x, state.y, tolerance, max_steps, blocks_at_once)
    exact = _solved(problem, x, start, plan)
    y, v = problem.split("state.y", state.y), problem.split("state.v", state.v)
    tracked = {n for n in v if v[n] is not None}
    solved = _inverted(problem, x, y, plan) if tracked else {}
    errors = {n: combine((1, y[n]), (-1, exact[n])) for n in y}
    slopes = _lower_slopes(problem, x, y, plan)
    slopes = {n: slopes[n] if isinstance(problem.levels[n], Argmin) else errors[n] for n in y}

    def rms(by_level: dict[str, PyTree]) -> PyTree:
        return problem.view(
            {n: None if e is None else norm(e) / problem.count**0.5 for n, e in by_level.items()}
        )

    inverse_errors = {n: combine((1, v[n]), (-1, solved[n])) if n in tracked else None for n in v}
    return Residuals(rms(errors), rms(slopes), rms(inverse_errors))


class _Plan(eqx.Module):
    """How to go about a problem: all of it is static, so that it is compiled once."""

    tolerance: float
    max_steps: int
    group: int


def _prepare(
    problem: Problem,
    x: PyTree,
    y0: PyTree,
    tolerance: float | None,
    max_steps: int,
    blocks_at_once: int | None,
) -> tuple[PyTree, dict[str, PyTree], _Plan]:
    """Checks all that was given, and says where the lower solver starts and how it goes about it."""
    _libraries()
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a bilevax.Problem, got {type(problem).__name__}")
    for name, level in problem.levels.items():
        if level.slots is not None:
            raise ValueError(
                f"diagnostics need one slot per block, got the lower level {name!r} with slots of its own"
            )
    max_steps = checks.whole_number("max_steps", max_steps, 1)
    checks.coefficient("tolerance", tolerance)
    x = checks.floating("x", x)
    dtype = result_dtype(x)
    given = dict.fromkeys(problem.levels) if y0 is None else problem.split("y0", y0)
    for name, level in problem.levels.items():
        if isinstance(level, Mean):
            given[name] = None
        elif given[name] is not None:
            label = f"y0[{name!r}]" if problem.named else "y0"
            given[name] = jax.tree.map(lambda a: a.astype(dtype), checks.floating(label, given[name]))
    sampler = _sampler(problem)
    given |= _inferred(problem, sampler, x, given)
    x, start, _ = checked_start(problem, x, problem.view(given), sampler)
    if blocks_at_once is None:
        group = _group(problem, sampler, start)
    else:
        group = checks.whole_number("blocks_at_once", blocks_at_once, 1)
    if tolerance is None:
        tolerance = 1e-8 if dtype == jnp.float64 else 1e-4
    groups = -(-problem.count // group)
    return x, start, _Plan(float(tolerance), max_steps, -(-problem.count // groups))


def _libraries() -> tuple[Any, Any]:
    """optimistix and lineax, which are no dependencies of the rest of the library."""
    try:
        import lineax
        import optimistix
    except ImportError as error:
        raise ImportError(
            'bilevax.diagnostics needs optimistix and lineax: pip install "bilevax[diagnostics]"'
        ) from error
    return optimistix, lineax


def _sampler(problem: Problem) -> Sampler:
    return make_sampler(problem, jax.random.key(0), None, None, True)


def _group(problem: Problem, sampler: Sampler, y: dict[str, PyTree]) -> int:
    """How many blocks to look at together, from the size of their rows and Hessians."""
    sample = _one_block(problem, sampler, None)
    size = max(sum(leaf[0].size for leaf in jax.tree.leaves(level)) for level in y.values())
    directions = size if size <= _DENSE else 1
    most = 1
    for batch in (sample.upper, *sample.lower.values()):
        leaves = jax.tree.leaves(batch.rows)
        own = 0 if batch.shared else sum(leaf.size for leaf in leaves)
        count = max((leaf.shape[0 if batch.shared else 1] for leaf in leaves), default=1)
        most = max(most, own + count * directions + size * directions)
    return max(1, _NUMBERS // most)


def _visit(problem: Problem, sampler: Sampler, blocks: Array, batch_size: int | None = None) -> Sample:
    """The sample of some blocks, with all their rows unless told otherwise."""
    return sampler.visit(problem, blocks, sampler.random, batch_size)


def _one_block(problem: Problem, sampler: Sampler, batch_size: int | None) -> Sample:
    """The shapes of a sample of one block."""
    return jax.eval_shape(lambda p, s: _visit(p, s, jnp.zeros(1, jnp.int32), batch_size), problem, sampler)


# --- Solving, a group of blocks at a time ---------------------------------------------------------------


def _solved(problem: Problem, x: PyTree, start: dict[str, PyTree], plan: _Plan) -> dict[str, PyTree]:
    """y(x) by level, checked."""
    found = _solve(problem, x, start, plan)
    for name, (_, sizes) in found.items():
        _judge(name, "was not solved: ‖∇_y g‖", sizes, plan, "another y0, more max_steps")
    return {name: y for name, (y, _) in found.items()}


def _inverted(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: _Plan) -> dict[str, PyTree]:
    """v(x, y) by level, checked."""
    found = _invert(problem, x, y, plan)
    for name, (_, sizes) in found.items():
        _judge(name, "has a Hessian that was not inverted: ‖∇²_yy g v − ∇_y f‖", sizes, plan, "float64")
    return {name: v for name, (v, _) in found.items()}


def _judge(name: str, what: str, sizes: tuple[Array, Array], plan: _Plan, remedy: str) -> None:
    """Raises if the residual of a block exceeds its bound, or is not a number."""
    residual, scale = (np.asarray(size, np.float64) for size in sizes)
    bad = ~(residual <= plan.tolerance * scale)
    if not bad.any():
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(bad, np.nan_to_num(residual / scale, nan=np.inf), -1.0)
    worst = int(np.argmax(excess))
    raise RuntimeError(
        f"lower level {name!r} of block {worst} {what} = {residual[worst]:.3g}, expected at most "
        f"{plan.tolerance * scale[worst]:.3g} (tolerance {plan.tolerance:g} × scale {scale[worst]:.3g}). "
        f"{bad.sum()} of {bad.size} blocks failed, this one by most. g must be smooth and strongly convex "
        f"in y; if it is, try {remedy} or a larger tolerance"
    )


@eqx.filter_jit
def _solve(problem: Problem, x: PyTree, start: dict[str, PyTree], plan: _Plan) -> dict[str, Any]:
    """By level y(x), and per block ‖∇_y g‖ and what to hold it against."""

    def look(sample: Sample, y: dict[str, PyTree]) -> dict[str, Any]:
        rows = (sample.constants, sample.upper, sample.lower)
        solvers = {n: functools.partial(_solve_one, level, n, plan) for n, level in problem.levels.items()}
        return {n: over_blocks(one, sample)(x, y[n], y[n], *rows) for n, one in solvers.items()}

    return _each_block(problem, plan, look, start)


def _solve_one(
    level: Any,
    name: str,
    plan: _Plan,
    x: PyTree,
    y: PyTree,
    _: Any,
    constants: PyTree,
    upper: Any,
    lower: Any,
) -> tuple[PyTree, tuple[Array, Array]]:
    if isinstance(level, Mean):
        return level.value(x, constants, lower[name].rows, lower[name].weight), _exact(x)
    value, flat, unravel = _flattened(level, x, y, constants, lower[name])
    flat, sizes = _minimise(value, flat, plan)
    return unravel(flat), sizes


@eqx.filter_jit
def _invert(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: _Plan) -> dict[str, Any]:
    """By level v = [∇²_yy g]⁻¹ ∇_y f, and per block ‖∇²_yy g v − ∇_y f‖ and what to hold it against."""

    def look(sample: Sample, y: dict[str, PyTree]) -> dict[str, Any]:
        by_y = upper_gradients(problem, Point(x, y), sample)
        rows = (sample.constants, sample.upper, sample.lower)
        solvers = {n: functools.partial(_invert_one, level, n, plan) for n, level in problem.levels.items()}
        return {n: over_blocks(one, sample)(x, y[n], by_y[n], *rows) for n, one in solvers.items()}

    return _each_block(problem, plan, look, y)


def _invert_one(
    level: Any,
    name: str,
    plan: _Plan,
    x: PyTree,
    y: PyTree,
    by_y: PyTree,
    constants: PyTree,
    upper: Any,
    lower: Any,
) -> tuple[PyTree, tuple[Array, Array]]:
    if isinstance(level, Mean):
        return by_y, _exact(x)
    value, flat, unravel = _flattened(level, x, y, constants, lower[name])
    right = ravel_pytree(by_y)[0]
    gradient = jax.grad(value)
    v = _system(gradient, flat, right, plan)
    _, push = jax.linearize(gradient, flat)
    return unravel(v), (norm(push(v) - right), norm(right) + norm(push(_unit(v))) * norm(v))


def _flattened(
    level: Argmin, x: PyTree, y: PyTree, constants: PyTree, batch: Batch
) -> tuple[Any, Array, Any]:
    """One block's g as a function of a flat y, that y, and the way back."""
    flat, unravel = ravel_pytree(y)

    def value(flat: Array) -> Array:
        return level.value(x, unravel(flat), constants, batch.rows, batch.weight)

    return value, flat, unravel


def _minimise(
    value: Callable[[Array], Array], start: Array, plan: _Plan
) -> tuple[Array, tuple[Array, Array]]:
    """The minimiser of one block's g, its ‖∇g‖ and the scale of that."""
    optimistix, _ = _libraries()
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
    y, (_, size, scale), *_ = jax.lax.while_loop(unfinished, newton, carry)
    return y, (jnp.where(jnp.isfinite(value(y)), size, jnp.nan), scale)


def _system(gradient: Callable[[Array], Array], y: Array, right: Array, plan: _Plan) -> Array:
    """[∇²g(y)]⁻¹ right: by a Cholesky factorisation if it is small, else by conjugate gradients."""
    _, lineax = _libraries()
    positive = lineax.positive_semidefinite_tag
    if y.size <= _DENSE:
        operator = lineax.MatrixLinearOperator(jax.jacfwd(gradient)(y), positive)
        return lineax.linear_solve(operator, right, lineax.Cholesky(), throw=False).value
    _, push = jax.linearize(gradient, y)
    size = _or_one(norm(right))
    unit = right / size
    # lineax takes curvatures below 100 d ε for zero, which is no small number in float32: they are scaled up.
    boost = 1e6 / _or_one(norm(push(unit)))
    operator = lineax.FunctionLinearOperator(
        lambda v: boost * push(v), jax.ShapeDtypeStruct(y.shape, y.dtype), positive
    )
    fine = max(1e-2 * plan.tolerance, 20 * float(jnp.finfo(y.dtype).eps))
    method = lineax.CG(rtol=fine, atol=fine, norm=norm)
    return size * boost * lineax.linear_solve(operator, unit, method, throw=False).value


@eqx.filter_jit
def _upper_mean(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: _Plan) -> Array:
    """The mean over the blocks of f_i(x, y_i)."""

    def one(x: Any, y: Any, _: Any, constants: Any, upper: Any, lower: Any) -> Array:
        return problem.upper_value(x, y, constants, upper.rows, upper.weight)

    def look(sample: Sample, y: dict[str, PyTree]) -> Array:
        return over_blocks(one, sample)(x, y, y, sample.constants, sample.upper, sample.lower)

    return jnp.mean(_each_block(problem, plan, look, y))


@eqx.filter_jit
def _lower_slopes(problem: Problem, x: PyTree, y: dict[str, PyTree], plan: _Plan) -> dict[str, PyTree]:
    """∂ℓ/∂v of every block: −∇_y g_i for an argmin level."""
    return _each_block(
        problem, plan, lambda sample, y: gradients(problem, Point(x, y), zeros_like(y), sample).v, y
    )


@eqx.filter_jit
def _mean_gradient(
    problem: Problem, x: PyTree, y: dict[str, PyTree], v: dict[str, PyTree], plan: _Plan
) -> PyTree:
    """The mean of ∂ℓ/∂x over all blocks, without a gradient in x per block."""
    sampler = _sampler(problem)
    groups, rest = divmod(problem.count, plan.group)

    def look(blocks: Array, total: PyTree) -> PyTree:
        sample = _visit(problem, sampler, blocks)
        seen = gradients(problem, Point(x, gather(y, blocks)), gather(v, blocks), sample)
        return combine((1, total), (blocks.shape[0] / problem.count, seen.x))

    def whole(number: Array, total: PyTree) -> PyTree:
        return look(number * plan.group + jnp.arange(plan.group), total)

    total = jax.lax.fori_loop(0, groups, whole, zeros_like(x))
    return look(jnp.arange(problem.count - rest, problem.count), total) if rest else total


def _each_block(problem: Problem, plan: _Plan, look: Callable[..., PyTree], y: dict[str, PyTree]) -> PyTree:
    """look(sample, y) on one group of blocks after the other; what it gives per block, for all of them."""
    sampler = _sampler(problem)
    groups = -(-problem.count // plan.group)
    # The last group is filled up with the last block, so that all groups are one compiled loop.
    blocks = jnp.minimum(jnp.arange(groups * plan.group), problem.count - 1).reshape(groups, plan.group)

    def visit(blocks: Array) -> PyTree:
        return look(_visit(problem, sampler, blocks), gather(y, blocks))

    out = jax.lax.map(visit, blocks)
    return jax.tree.map(lambda a: jnp.reshape(a, (-1, *a.shape[2:]))[: problem.count], out)


def _exact(x: PyTree) -> tuple[Array, Array]:
    """The residual, and its scale, of what needs no solver."""
    zero = jnp.zeros((), result_dtype(x))
    return zero, zero


def _unit(like: Array) -> Array:
    return jnp.full_like(like, like.size**-0.5)


def _or_one(size: Array) -> Array:
    return jnp.where(size > 0, size, 1)


# --- The shape of y, when no y0 says it -----------------------------------------------------------------


def _inferred(problem: Problem, sampler: Sampler, x: PyTree, given: dict[str, PyTree]) -> dict[str, PyTree]:
    """Zeros for the argmin levels without a start, in the only shape that the user's functions accept."""
    missing = [n for n, level in problem.levels.items() if isinstance(level, Argmin) and given[n] is None]
    if not missing:
        return {}
    dtype = result_dtype(x)
    sample = _one_block(problem, sampler, None)
    lengths = _lengths(sample, x)
    if any(batch.weight is not None for batch in (sample.upper, *sample.lower.values())):
        # Weighted rows are handed over one by one, and an axis of one row fits anything: look at more rows,
        # of a number that is no other length.
        sample = _one_block(problem, sampler, max(lengths, default=1) + 1)
    shapes = [(n,) for n in sorted(lengths - {1})] + [(1,)] * (1 in lengths) + [()]
    known = {n: _means(level, n, sample, x) for n, level in problem.levels.items() if isinstance(level, Mean)}
    known |= {
        n: jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), tree)
        for n, tree in given.items()
        if tree is not None
    }
    errors: list[Exception] = []

    def lower_fits(name: str, shape: tuple[int, ...]) -> bool:
        level: Any = problem.levels[name]

        def one(x: Any, y: Any, _: Any, constants: Any, upper: Any, lower: Any) -> Array:
            return level.value(x, y, constants, lower[name].rows, lower[name].weight)

        return _is_scalar(one, sample, x, jax.ShapeDtypeStruct((1, *shape), dtype), errors)

    def upper_fits(choice: tuple[tuple[int, ...], ...]) -> bool:
        def one(x: Any, y: Any, _: Any, constants: Any, upper: Any, lower: Any) -> Array:
            return problem.upper_value(x, y, constants, upper.rows, upper.weight)

        own = {n: jax.ShapeDtypeStruct((1, *shape), dtype) for n, shape in zip(missing, choice, strict=True)}
        return _is_scalar(one, sample, x, known | own, errors)

    accepted = [[shape for shape in shapes if lower_fits(n, shape)] for n in missing]
    choices = [choice for choice in itertools.product(*accepted) if upper_fits(choice)]
    for place in range(len(missing)):
        best = min((_rank(choice[place]) for choice in choices), default=0)
        choices = [choice for choice in choices if _rank(choice[place]) == best]
    if len(choices) == 1:
        return {
            n: jnp.zeros((problem.count, *shape), dtype) for n, shape in zip(missing, choices[0], strict=True)
        }
    ask = f"give y0, with a leading axis of {problem.count} (one entry per block)"
    if choices:
        listed = "; ".join(
            ", ".join(f"{n!r}: {shape}" for n, shape in zip(missing, choice, strict=True))
            if problem.named
            else str(choice[0])
            for choice in choices
        )
        raise ValueError(
            f"y0 is left out, and several shapes of one block's y fit lower and upper: {listed}. So {ask}"
        )
    tried = ", ".join(map(str, shapes))
    raise ValueError(
        f"y0 is left out, and no shape of one block's y fits lower and upper (tried {tried}). So {ask}"
    ) from (errors[0] if errors else None)


def _rank(shape: tuple[int, ...]) -> int:
    """Vectors first; a vector of one entry or a number only if no vector fits: they broadcast to anything."""
    return 2 if shape == () else int(shape == (1,))


def _lengths(sample: Sample, x: PyTree) -> set[int]:
    """The lengths of all axes of x, the block constants and the rows, but for those of blocks and rows."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(x)]
    shapes += [leaf.shape[1:] for leaf in jax.tree.leaves(sample.constants)]
    for batch in (sample.upper, *sample.lower.values()):
        shapes += [leaf.shape[1 if batch.shared else 2 :] for leaf in jax.tree.leaves(batch.rows)]
    return set(itertools.chain(*shapes))


def _means(level: Any, name: str, sample: Sample, x: PyTree) -> PyTree:
    """The shapes of a mean level's variable."""

    def one(x: Any, y: Any, _: Any, constants: Any, upper: Any, lower: Any) -> PyTree:
        return level.value(x, constants, lower[name].rows, lower[name].weight)

    return _traced(one, sample, x, jax.ShapeDtypeStruct((1,), jnp.float32))


def _is_scalar(one: Any, sample: Sample, x: PyTree, y: PyTree, errors: list[Exception]) -> bool:
    """Whether a function of one block runs on these shapes and gives one number."""
    try:
        out = _traced(one, sample, x, y)
    except Exception as error:  # a user's function may fail on a wrong shape in any way
        errors.append(error)
        return False
    return isinstance(out, jax.ShapeDtypeStruct) and out.shape == (1,)


def _traced(one: Any, sample: Sample, x: PyTree, y: PyTree) -> Any:
    def look(sample: Sample, x: PyTree, y: PyTree) -> Any:
        return over_blocks(one, sample)(x, y, y, sample.constants, sample.upper, sample.lower)

    return jax.eval_shape(look, sample, x, y)
