"""A few blocks solved on all their rows, to compare what a run tracks with the truth.

Unlike the diagnostics it needs no other library, and it does not ask for high accuracy: its errors must be
small beside those of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from bilevax._problem.problem import Problem
from bilevax._problem.reading import readers
from bilevax._problem.risk import weights_of
from bilevax._problem.sampling import all_rows
from bilevax._problem.view import BlockView, each_block
from bilevax._step.lagrangian import Point, gradients, with_terms
from bilevax._step.slots import gather
from bilevax._step.state import State
from bilevax._truth.lower_solve import SMALL, USUAL_STEPS, Solved, solve_lower_problem
from bilevax._truth.matrix_free import USUAL
from bilevax._truth.own_solve import Minimised, own_levels, solve_own
from bilevax._truth.saddle_solve import indefinite_inverse, solve_saddle
from bilevax._truth.set_solve import multiplier_within, projection, solve_within
from bilevax._util.hurried import HurriedJit
from bilevax._util.trees import PyTree, combine, norm

_ENTRIES = 2**22  # of the rows of all blocks that are solved at once
_PASSES = 20  # over them, about: Newton steps, whose Hessians are products of matrices
_CALLS = 20  # of the program for some blocks, about, by a run that is looked at and made exact
_CHEAP = 2**18  # numbers in the rows of all blocks together
_FEWEST, _MOST = 32, 1024  # blocks
_FEWEST_OF_A_RISK = 512  # a few blocks say nothing about a tail or a rare group
_PER_BLOCK = 400  # what a block takes besides its numbers, as if they were so many more
_PER_PASS = 8  # products with the Hessian, which are one product of matrices


class Truth(NamedTuple):
    """Some blocks at x: with the tracked y and v, and solved.

    Attributes:
      tracked: per block, f_i(x, y_i).
      value: per block, f_i(x, y_i(x)).
      y_error: per block, ‖y_i − y_i(x)‖ / ‖y_i(x)‖, the largest of all levels.
      v_error: the same of v; NaN if no level tracks it.
      left: per block, by how much f would change if another Newton step were taken: small if the block was
        solved.
      slope: the mean of ∇F_i; under a risk, weighed as if there were no other blocks.
      gradient: its norm.
      gradient_error: how far that mean is off with the tracked y and v.
      y: by level, y_i(x).
      steps: the Newton steps of the block that took most, or as much work.
    """

    tracked: Array
    value: Array
    y_error: Array
    v_error: Array
    left: Array
    slope: PyTree
    gradient: Array
    gradient_error: Array
    y: dict[str, PyTree]
    steps: Array


def blocks_to_solve(problem: Problem, most: int | None = None) -> Array:
    """The numbers of some blocks, evenly spread; left out, as many as are cheap to solve."""
    if most is None:
        cheap = min(_MOST, _CHEAP // max(_entries_of_a_block(problem), 1))
        fewest = _FEWEST if problem.risk is None else _FEWEST_OF_A_RISK
        most = max(1, affordable_blocks(problem, max(fewest, cheap)))
    chosen = np.linspace(0, problem.count - 1, min(problem.count, most)).round().astype(int)
    return jnp.asarray(np.unique(chosen))


def solve_at(problem: Problem, x: PyTree, state: State, blocks: Array) -> Truth:
    """Solves some blocks at any x, from the y of a state; its v is compared with that at x."""
    state = state.settled
    y, v = problem.split("state.y", state.y), problem.split("state.v", state.v)
    y, v = gather(y, blocks), {name: None if v[name] is None else gather(v[name], blocks) for name in v}
    x = jax.tree.map(lambda a, like: jnp.asarray(a, like.dtype), x, state.x)
    return solve_few(problem, x, y, v, blocks)


def work_of_solving(problem: Problem, blocks: int, y: PyTree) -> float:
    """About how many numbers are read to solve some blocks; see `work_of_a_step`."""
    entries = sum(leaf[0].size for leaf in jax.tree.leaves(y))
    passes = USUAL_STEPS * (4 + entries / _PER_PASS) if entries <= SMALL else USUAL
    return blocks * _entries_of_a_block(problem) * passes


def work_of_a_newton_step(problem: Problem, y: PyTree) -> float:
    """About how many numbers a Newton step of all blocks reads."""
    entries = min(sum(leaf[0].size for leaf in jax.tree.leaves(y)), SMALL)
    factors = problem.count * (_PER_BLOCK + entries**2 + entries**3 / 3)
    return work_of_solving(problem, problem.count, y) / USUAL_STEPS + factors


def solve_few(
    problem: Problem,
    x: PyTree,
    y: dict[str, PyTree],
    v: dict[str, PyTree],
    blocks: Array,
    weights: Array | None = None,
) -> Truth:
    """Solves some blocks at x: see `_solve_few`; compiled once for all x of the same shapes."""
    work = _CALLS * _PASSES * blocks.size * _entries_of_a_block(problem)
    return _compiled(problem, x, y, v, blocks, weights, work=work)


def _solve_few(
    problem: Problem,
    x: PyTree,
    y: dict[str, PyTree],
    v: dict[str, PyTree],
    blocks: Array,
    weights: Array | None,
) -> Truth:
    """Solves some blocks at x.

    Args:
      problem: the problem.
      x: the upper variable.
      y: per level, the tracked variables of these blocks, from where they are solved.
      v: per level, their tracked multipliers, or None.
      blocks: the numbers of the blocks.
      weights: of the blocks in the mean of ∇F_i; None for those of the problem's risk, or ones.
    """
    sampler = all_rows(problem)
    sample = sampler.visit(problem, blocks, sampler.random, None)
    best, multipliers, left, steps = each_block(problem, x, sample, _solve, y)
    used = {name: multipliers[name] if v[name] is None else v[name] for name in v}
    tracked = each_block(problem, x, sample, BlockView.f, y)
    value = each_block(problem, x, sample, BlockView.f, best)
    weights = weights_of(problem.risk, value, blocks) if weights is None else weights
    seen = gradients(problem, Point(x, y, weights), used, sample).x
    true = gradients(problem, Point(x, best, weights), multipliers, sample).x
    by_level = [_relative(y[name], best[name]) for name in y]
    of_v = [_relative(v[name], multipliers[name]) for name in v if v[name] is not None]
    return Truth(
        tracked,
        value,
        jnp.max(jnp.stack(by_level), 0),
        jnp.max(jnp.stack(of_v), 0) if of_v else jnp.full(blocks.shape, jnp.nan),
        left,
        true,
        norm(true),
        norm(combine((1, seen), (-1, true))),
        best,
        jnp.max(steps),
    )


_compiled = HurriedJit(_solve_few)


def affordable_blocks(problem: Problem, most: int) -> int:
    """How many blocks can be solved at once at little cost, at most; 0 if one has too many rows."""
    return min(most, _ENTRIES // max(_entries_of_a_block(problem), 1))


def _entries_of_a_block(problem: Problem) -> int:
    """The numbers in all rows of a block, and in its own constants."""
    shapes = all_rows(problem).one_block(problem, None, slots=False)
    batches = (shapes.upper, *shapes.lower.values())
    rows = sum(leaf.size for batch in batches for leaf in jax.tree.leaves(batch.rows))
    return 1 + rows + sum(leaf.size // problem.count for leaf in jax.tree.leaves(problem.blocks))


def require_slot_per_block(problem: Problem, caller: str) -> None:
    """Raises if a lower level cannot be solved block by block."""
    for name, level in problem.levels.items():
        if level.slots is not None:
            raise ValueError(
                f"{caller} needs one slot per block, got the lower level {name!r} with slots of its own"
            )


def _solve(
    view: BlockView, y: dict[str, PyTree]
) -> tuple[dict[str, PyTree], dict[str, PyTree], Array, Array]:
    """y(x) and [∇²_yy g]⁻¹ ∇_y f of every level.

    And by how much f would change by another Newton step, and how many were taken.
    """
    best, solved = {}, {}
    own = own_levels(view)
    for name in view.problem.order:
        if name in own:
            continue
        if view.problem.levels[name].has_hessian:
            solved[name] = solve_level(view, name, y[name], best)
            best[name] = ravel_pytree(y[name])[1](solved[name].y)
        else:
            best[name] = view.c(name, best)
    left = jnp.zeros(())
    if own:
        found = solve_own(view, best, {name: y[name] for name in own}, _own_minimum)
        best, left = best | found.y, found.left
    best = {name: best[name] for name in y}
    multipliers = jax.grad(view.f)(best)
    for name in reversed(view.problem.order):
        known = {other: multipliers[other] for other in readers(view.problem.levels, name)}
        multipliers[name] = with_terms(view, name, best, multipliers[name], known)
        if name in solved:
            slope, unravel = ravel_pytree(multipliers[name])
            multipliers[name] = unravel(solved[name].inverse(slope))
            left += jnp.abs(jnp.vdot(slope, solved[name].move))
    uncounted = jnp.asarray(USUAL_STEPS if own else 1, jnp.int32)
    steps = sum((jnp.asarray(one.steps) for one in solved.values()), uncounted)
    return best, multipliers, left, steps


def solve_level(view: BlockView, name: str, y: PyTree, others: dict[str, PyTree]) -> Solved:
    """The minimiser or the saddle point of a level's g, in its set, from y; `others` has what it reads."""
    level, (flat, unravel) = view.problem.levels[name], ravel_pytree(y)

    def value(flat: Array) -> Array:
        return view.g(name, unravel(flat), others)

    if level.is_bounded:
        project = projection(view, name, y)
        found = solve_within(value, project, flat)
        move = jnp.where(found.good, found.move, jnp.nan)
        return Solved(found.y, move, lambda right: multiplier_within(value, project, found.y, right)[0])
    if level.sign == 0:
        saddle = solve_saddle(view, name, y, others)
        move = jnp.where(saddle.good, saddle.move, jnp.nan)
        return Solved(saddle.y, move, indefinite_inverse(jax.grad(value), saddle.y))
    return solve_lower_problem(value, flat)


def _own_minimum(value: Callable[[Array], Array], start: Array) -> Minimised:
    found = solve_lower_problem(value, start)
    slope = jax.grad(value)(found.y)
    return Minimised(found.y, norm(slope), norm(slope), jnp.abs(jnp.vdot(slope, found.move)))


def _relative(tracked: PyTree, true: PyTree) -> Array:
    """Per block, the size of the difference as a share of that of the truth."""

    def one(tracked: PyTree, true: PyTree) -> Array:
        size = norm(true)
        return norm(combine((1, tracked), (-1, true))) / jnp.where(size > 0, size, 1)

    return jax.vmap(one)(tracked, true)
