"""The truth, for problems small enough to be solved: y(x), F(x), ∇F(x), and how far a run is off.

Nothing here is sampled: every function goes over all blocks and all rows. What was not solved to the
tolerance raises, and is never returned.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from bilevax._problem.finite import check_finite
from bilevax._problem.problem import Problem
from bilevax._problem.row_means import check_row_means
from bilevax._problem.sampling import all_rows
from bilevax._step.state import State
from bilevax._truth.exact import (
    Accuracy,
    group_size,
    inverted,
    libraries,
    lower_slopes,
    mean_gradient,
    solved,
    upper_mean,
)
from bilevax._truth.shapes import inferred
from bilevax._util import checks
from bilevax._util.trees import PyTree, combine, norm, result_dtype
from bilevax.solvers.start_checks import checked_start


class Evaluation(NamedTuple):
    """What `value_and_hypergradient` returns.

    Attributes:
      value: F(x).
      gradient: ∇F(x), a pytree like x.
      y: the exact lower solutions, where the next evaluation may start.
    """

    value: Array
    gradient: PyTree
    y: PyTree


class Residuals(eqx.Module):
    """How far a run is from the truth; each entry is a dict if the levels have names. Prints as a table.

    Attributes:
      y: root mean square over the blocks of ‖y_i − y_i(x)‖.
      gradient: the same of ‖∇_y g_i(x, y_i)‖ (of ‖y_i − c_i(x)‖, for a mean level; of ‖∇_y f_i‖, for
        variables that optimise f; of ‖y_i − Π(y_i − ∇_y g_i)‖, for a y that stays in a set). A level that
        reads others is looked at with theirs of the run.
      v: the same of ‖v_i − [∇²_yy g_i]⁻¹ ∇_y f_i‖ at (x, y_i); None for a level that tracks no v.
    """

    y: PyTree
    gradient: PyTree
    v: PyTree

    def __repr__(self) -> str:
        def shown(entry: PyTree) -> str:
            if isinstance(entry, dict):
                return f"{{{', '.join(f'{name!r}: {shown(one)}' for name, one in entry.items())}}}"
            return _digits(entry)

        return f"Residuals(y={shown(self.y)}, gradient={shown(self.gradient)}, v={shown(self.v)})"

    def __str__(self) -> str:
        rows = {"y": self.y, "gradient": self.gradient, "v": self.v}
        named = isinstance(self.y, dict)
        lines = [["", *self.y]] if named else []
        for name, entry in rows.items():
            lines.append([name, *map(_digits, entry.values() if named else [entry])])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _digits(number: Array | None) -> str:
    return "None" if number is None else f"{float(number):.3g}"


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

    and, for `minimum` and `maximum` levels, the optimum of f_i at these. Levels are solved in order, so that
    one may read the solutions of those before it.

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
    problem = _plain(problem)
    x, start, plan = _prepare(problem, x, y0, tolerance, max_steps, blocks_at_once)
    return problem.view(solved(problem, x, start, plan))


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

    or the risk of these values, if the problem has one.

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
    problem = _plain(problem)
    x, start, plan = _prepare(problem, x, y0, tolerance, max_steps, blocks_at_once)
    return upper_mean(problem, x, solved(problem, x, start, plan), plan)


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

    with :math:`+ \nabla c_i(x)^\top \nabla_y f_i` for a mean level, and nothing for variables that optimise
    f: where they are optimal, f does not change with them. If a level reads others, their ∇_y f contains its
    term of ℓ, too. What a bound holds stays where it is. Under a risk the terms are weighed by
    :math:`m\, \partial F / \partial f_i`; at a kink, where blocks tie, this is one of the subgradients.

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
    options = {"tolerance": tolerance, "max_steps": max_steps, "blocks_at_once": blocks_at_once}
    return value_and_hypergradient(problem, x, y0, **options).gradient


def value_and_hypergradient(
    problem: Problem,
    x: PyTree,
    y0: PyTree = None,
    *,
    tolerance: float | None = None,
    max_steps: int = 200,
    blocks_at_once: int | None = None,
) -> Evaluation:
    r"""F(x) and ∇F(x) from one solution of the lower problems, which it returns as well.

    For problems small enough that an optimizer like L-BFGS can solve them exactly: give the y of one
    evaluation to the next as `y0`, and the lower solver starts near the solution.

    Args:
      problem: as in `solve_lower`, like all that follow.
      x: the upper variable.
      y0: where the lower solver starts.
      tolerance: of the lower solutions, and of the linear systems.
      max_steps: the most steps of BFGS per block.
      blocks_at_once: the most blocks looked at together.

    Returns:
      An `Evaluation`: (value, gradient, y).

    Raises:
      RuntimeError, ValueError, ImportError: as `hypergradient`.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp, numpy as np
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum(y**2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - block * x) ** 2),
      ...     blocks=jnp.arange(6.0).reshape(3, 2),
      ... )
      >>> value, gradient, y = bx.value_and_hypergradient(problem, jnp.ones(2))
      >>> print(round(float(value), 3), np.asarray(gradient).round(3))
      18.333 [13.333 23.333]
    """
    problem = _plain(problem)
    x, start, plan = _prepare(problem, x, y0, tolerance, max_steps, blocks_at_once)
    y = solved(problem, x, start, plan)
    gradient = mean_gradient(problem, x, y, inverted(problem, x, y, plan), plan)
    return Evaluation(upper_mean(problem, x, y, plan), gradient, problem.view(y))


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
      >>> print(bx.residuals(problem, state))
      y         2
      gradient  4
      v         0
    """
    if not isinstance(state, State):
        raise TypeError(f"state must be the state of a run, got {type(state).__name__}")
    problem, state = _plain(problem), state.settled
    x, start, plan = _prepare(problem, state.x, state.y, tolerance, max_steps, blocks_at_once)
    solution = solved(problem, x, start, plan)
    y, v = problem.split("state.y", state.y), problem.split("state.v", state.v)
    tracked = {n for n in v if v[n] is not None}
    inverse = inverted(problem, x, y, plan) if tracked else {}
    errors = {n: combine((1, y[n]), (-1, solution[n])) for n in y}
    slopes = lower_slopes(problem, x, y, plan)
    values = {n for n in y if problem.levels[n].is_value}
    slopes = {n: combine((1, y[n]), (-1, slopes[n])) if n in values else slopes[n] for n in y}

    def rms(by_level: dict[str, PyTree]) -> PyTree:
        return problem.view(
            {n: None if e is None else norm(e) / problem.count**0.5 for n, e in by_level.items()}
        )

    inverse_errors = {n: combine((1, v[n]), (-1, inverse[n])) if n in tracked else None for n in v}
    return Residuals(rms(errors), rms(slopes), rms(inverse_errors))


def _plain(problem: Problem) -> Problem:
    """The problem in terms of y itself, where a run stores offsets."""
    return problem.without_centres() if isinstance(problem, Problem) else problem


def _prepare(
    problem: Problem,
    x: PyTree,
    y0: PyTree,
    tolerance: float | None,
    max_steps: int,
    blocks_at_once: int | None,
) -> tuple[PyTree, dict[str, PyTree], Accuracy]:
    """Checks all that was given, and says where the lower solver starts and how it goes about it."""
    libraries()
    sampler = all_rows(problem)
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
        if level.is_value:
            given[name] = None
        elif given[name] is not None:
            label = f"y0[{name!r}]" if problem.named else "y0"
            given[name] = jax.tree.map(lambda a: a.astype(dtype), checks.floating(label, given[name]))
    given |= inferred(problem, sampler, x, given)
    check_finite(problem, x, problem.view(given), "x")
    x, start, _ = checked_start(problem, x, problem.view(given), sampler)
    check_row_means(problem, x, problem.view(given))
    if blocks_at_once is None:
        group = group_size(problem, sampler, start)
    else:
        group = checks.whole_number("blocks_at_once", blocks_at_once, 1)
    if tolerance is None:
        tolerance = 1e-8 if dtype == jnp.float64 else 1e-4
    groups = -(-problem.count // group)
    return x, start, Accuracy(float(tolerance), max_steps, -(-problem.count // groups))
