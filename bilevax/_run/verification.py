"""Whether what a run tracks is the truth, and x better than where it started."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._problem.risk import overall, weights_of
from bilevax._problem.rows import PerBlock, Shared
from bilevax._problem.sampling import Sampler
from bilevax._run.ill_posed import curvature_fault
from bilevax._run.remedies import another_step, has_automatic_step, joined, less_noise, newton_steps
from bilevax._step.state import State
from bilevax._truth.few_blocks import (
    affordable_blocks,
    blocks_to_solve,
    require_slot_per_block,
    solve_at,
    work_of_solving,
)
from bilevax._util import checks
from bilevax._util.trees import PyTree, combine, inner
from bilevax.solvers.base import AbstractSolver

_AT_REST = (
    "x did not move: ∇F(x0) is zero, as at a point of symmetry or where f does not depend on x: start from "
    "another x0, such as small random numbers"
)
_OFF = 0.02  # of F, by which the tracked f may differ from it
_SMALL = 0.001  # of the decrease of F: less is of no interest, where F is nearly zero
_MISLED = 0.9  # of the gradient, by which that with the tracked y and v may be off
_ASTRAY, _STEEP = 0.25, 0.25  # the same, where ∇F(x) is still so large a share of ∇F(x0)
_UNKNOWN = 0.9  # of v: more may mean that y(x) is not unique
_FEW_VISITS = 100  # of a block, before which x may be on its way
_HARDLY_LESS = 0.5  # ‖∇F‖, as a share of that at x0
_STILL_DOWNHILL = 0.3  # the slope of F along the way of x, as a share of that at x0: a tenth of it is left
_SHARE = 0.05  # of the work of a run
_SLOWER, _FASTER = 0.3, 3.0  # times a step, as advice
_LEFT = 0.005  # of F, by which a further Newton step may change it


class AccuracyWarning(UserWarning):
    """A run has ended, but its answer is not to be trusted."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """A few blocks, solved on all their rows at the x of a run.

    Attributes:
      blocks: how many blocks were solved.
      objective: the mean of f_i(x, y_i(x)) over these blocks: F, if they are all blocks. If the problem has a
        risk, that of these blocks, as if there were no others; likewise below.
      tracked: the mean of f_i(x, y_i) with the y_i of the run.
      start: the mean of f_i(x₀, y_i(x₀)).
      y_error: ‖y_i − y_i(x)‖ / ‖y_i(x)‖, the median over the blocks.
      v_error: the same of the multipliers v; NaN if the method tracks none.
      gradient_error: ‖G − ∇F‖ over these blocks, where G is ∇F with the y and v of the run, as a share of the
        larger one of ‖∇F(x)‖ and ‖∇F(x₀)‖.
      message: what is wrong; empty if nothing is.
      ill_posed: whether it is the problem itself: lower problems without a unique minimum.
    """

    blocks: int
    objective: float
    tracked: float
    start: float
    y_error: float
    v_error: float
    gradient_error: float
    message: str
    ill_posed: bool = False


def verify(
    problem: Problem,
    state: State,
    x0: PyTree,
    *,
    blocks: int | None = None,
    solver: AbstractSolver | None = None,
) -> Verification:
    """Solves a few blocks on all their rows, and compares what a run tracks with the truth.

    Args:
      problem: the problem.
      state: the state of a run, of any solver.
      x0: where the run started.
      blocks: how many blocks; left out, from 32 to 1,024, fewer if they have many rows.
      solver: the solver of the run, whose upper step the message may name.

    Returns:
      A `Verification`.

    Raises:
      ValueError: if a lower level has slots of its own, which cannot be solved block by block.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> x0, y0 = jnp.zeros(2), jnp.zeros((4, 2))
      >>> result = bx.minimize(problem, x0, y0, steps=1000, key=jax.random.key(0), progress=None)
      >>> found = bx.verify(problem, result.state, x0)
      >>> round(found.start, 3), round(found.objective, 3), found.message
      (35.0, 10.0, '')
    """
    problem, state = problem.without_centres(), state.settled
    require_slot_per_block(problem, "verify")
    x0 = jax.tree.map(lambda a, like: jnp.asarray(a, like.dtype), x0, state.x)
    chosen = blocks_to_solve(problem, None if blocks is None else checks.whole_number("blocks", blocks, 1))
    # At x0 the multipliers of the run mean nothing, but with them both calls are one program.
    start, found = solve_at(problem, x0, state, chosen), solve_at(problem, state.x, state, chosen)
    result = Verification(
        len(chosen),
        float(overall(problem.risk, found.value, chosen)),
        float(overall(problem.risk, found.tracked, chosen)),
        float(overall(problem.risk, start.value, chosen)),
        float(jnp.median(found.y_error)),
        float(jnp.median(found.v_error)),
        float(found.gradient_error / jnp.maximum(found.gradient, start.gradient)),
        "",
    )
    if int(state.step) > 0 and float(start.gradient) == 0.0 and _are_equal(state.x, x0):
        return dataclasses.replace(result, message=_AT_REST)
    change = np.asarray(
        _parts(problem, found.value, chosen) - _parts(problem, start.value, chosen), np.float64
    )
    # F may rise on a few blocks where it falls on all: their spread says what that can account for. Under a
    # risk it does so wherever the worst blocks are not among them.
    spread = 0.0 if len(chosen) == problem.count else float(np.std(change)) / len(chosen) ** 0.5
    spread = np.inf if problem.risk is not None and len(chosen) < problem.count else spread
    done = int(state.step)
    better = newton_steps(problem, problem.split("state.y", state.y), solver)
    better += less_noise(problem, state.sampler)
    choices = better, f"steps={4 * done} instead of {done}", another_step(solver, _SLOWER)
    left = float(jnp.mean(jnp.maximum(found.left, start.left)))
    rest = float(found.gradient / jnp.maximum(start.gradient, jnp.finfo(jnp.float32).tiny))
    message = _message(result, problem.assumptions, left, rest, 2 * spread, *choices)
    message = message or _on_its_way(len(chosen), rest, done, state.sampler)
    if not message and result.start - result.objective > max(2 * spread, _SMALL * abs(result.start)):
        way = combine((1, state.x), (-1, x0))
        slopes = [-float(inner(one.slope, way)) for one in (start, found)]
        message = _still_downhill(len(chosen), slopes, f"steps={4 * done} instead of {done}", solver)
    fault = curvature_fault(problem, state.x, state.y) if result.v_error > _UNKNOWN else ""
    return dataclasses.replace(result, message=fault or message, ill_posed=bool(fault))


def _parts(problem: Problem, values: Array, blocks: Array) -> Array:
    """The parts of blocks in the objective."""
    weights = weights_of(problem.risk, values, blocks)
    return values if weights is None else weights * values


def _are_equal(x: PyTree, x0: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(x0), strict=True)
    return all(bool(jnp.all(a == b)) for a, b in pairs)


def can_verify(problem: Problem, y: PyTree, work: float) -> bool:
    """Whether a few blocks can be solved, at little cost, or at little cost beside the work of a run.

    Sources of rows that a user wrote may not be able to return all rows. Functions that draw random numbers
    have no value that a run could be compared with.
    """
    known = all(
        isinstance(rows, (Shared, PerBlock, type(None))) for rows in (problem.upper_data, *problem.lower_data)
    )
    own_slots = any(level.slots is not None for level in problem.levels.values())
    if not known or own_slots or problem.random:
        return False
    return affordable_blocks(problem, 1) > 0 or 2 * work_of_solving(problem, 1, y) <= _SHARE * work


def _message(
    found: Verification,
    assumptions: str,
    left: float,
    rest: float,
    noise: float,
    less_noise: list[str],
    steps: str,
    upper: str,
) -> str:
    """What is wrong, and what to try; `rest` is ‖∇F(x)‖/‖∇F(x0)‖."""
    of = f"on {found.blocks} blocks that were solved on all their rows"
    scale = max(abs(found.objective), abs(found.start - found.objective))
    if not (np.isfinite([found.objective, found.start]).all() and left <= _LEFT * scale):
        return (
            "the answer could not be verified: from where the run ended, some lower problems could not be "
            f"solved; {assumptions}, and x must not have run off to where that hardly holds: look at "
            "result.x, bound it (bx.bounded), or regularise f"
        )
    worse = found.objective - found.start
    if worse > max(_OFF * abs(found.start), noise):
        return (
            f"x is worse than x0: {of}, F is {found.objective:.4g}, and {found.start:.4g} at x0; the lower "
            f"variables did not follow x: try {joined([*less_noise, upper])}"
        )
    off = found.tracked - found.objective
    if abs(off) > _OFF * abs(found.objective) and abs(off) > _SMALL * abs(worse):
        return (
            f"the objective in the history is not F: {of}, F is {found.objective:.4g}, but f is "
            f"{found.tracked:.4g} with the lower variables of the run, which are off by "
            f"{100 * found.y_error:.3g}%: try {joined([*less_noise, steps, upper])}"
        )
    if found.gradient_error > (_ASTRAY if rest > _STEEP else _MISLED):
        return (
            f"x was moved along a wrong gradient: {of}, the gradient with the y and v of the run is off by "
            f"{found.gradient_error:.3g} times the larger one of ∇F(x) and ∇F(x0): try "
            f"{joined([*less_noise, steps, upper])}"
        )
    return ""


def _on_its_way(solved: int, rest: float, steps: int, sampler: Sampler) -> str:
    """What to try if blocks were visited too rarely for x to get anywhere; `rest` is ‖∇F(x)‖/‖∇F(x0)‖."""
    visits = steps * sampler.per_step / sampler.blocks
    if sampler.per_step == sampler.blocks or visits >= _FEW_VISITS or not rest > _HARDLY_LESS:
        return ""
    more = min(4 * sampler.per_step, sampler.blocks)
    return (
        f"x is still on its way: on {solved} blocks that were solved on all their rows, ‖∇F‖ is {rest:.2g} "
        f"times that at x0, and a block was visited {visits:.3g} times on average: try "
        f"blocks_per_step={more} instead of {sampler.per_step}, or steps={4 * steps} instead of {steps}"
    )


def _still_downhill(solved: int, slopes: list[float], steps: str, solver: AbstractSolver | None) -> str:
    """What to try if F still falls along the way that x has gone; `slopes` are those at x0 and at x."""
    first, last = slopes
    if not (first > 0 and last > _STILL_DOWNHILL * first):
        return ""
    faster = [] if has_automatic_step(solver) else [another_step(solver, _FASTER)]
    return (
        f"x is still on its way: on {solved} blocks that were solved on all their rows, F still falls along "
        f"the way from x0, {last / first:.2g} times as steeply as at x0: try {joined([*faster, steps])}"
    )
