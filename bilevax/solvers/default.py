"""The solver of a run if none is given."""

from __future__ import annotations

import math

import jax
import numpy as np

from bilevax._problem.levels import Level
from bilevax._problem.problem import Problem
from bilevax._problem.sample_sizes import rows_of_a_visit
from bilevax._problem.sampling import Sampler
from bilevax._util import checks
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.block_newton import BlockNewton
from bilevax.solvers.bsvrb_v2 import BSVRBv2
from bilevax.solvers.f2sa import F2SA
from bilevax.solvers.mmbo import MMBO
from bilevax.solvers.start_checks import touched_slots

_NARROW = 64  # lower variables of a block, up to which a step can always afford to factorise Hessians
_MOST_WORK = 2**28  # products in a step, up to which it can afford that for more variables
_MOST = 2**26  # entries of all Hessians together


def chosen_solver(
    problem: Problem, solver: AbstractSolver | None, y0: PyTree, sampler: Sampler
) -> AbstractSolver:
    """The solver that was given; else BlockNewton for small lower problems and MMBO for large ones.

    Only penalty methods follow a lower solution in a set that is not made of bounds: there it is F2SA. Where
    blocks share slots, because they touch more than there are, a visit sees a part of what a slot's variable
    depends on, however many rows it has: there it is BSVRBv2, which averages.
    """
    if solver is None:
        if any(_on_set(level) for level in problem.levels.values()):
            return F2SA()
        if any(_shared(name, problem, sampler) for name in problem.levels):
            return BSVRBv2()
        small = all(_small(*level, y0, problem, sampler) for level in problem.levels.items())
        return BlockNewton() if small else MMBO()
    checks.solver(solver, AbstractSolver)
    return solver


def _shared(name: str, problem: Problem, sampler: Sampler) -> bool:
    """Whether all blocks together touch more slots than there are."""
    by_block = touched_slots(problem, sampler, name) // sampler.per_step
    return problem.count * by_block > problem.slots_of(name)


def _on_set(level: Level) -> bool:
    """Whether a lower solution is confined to a set that is no box: then only penalties follow it."""
    return level.has_hessian and level.domain is not None and not level.domain.entrywise


def _small(name: str, level: Level, y0: PyTree, problem: Problem, sampler: Sampler) -> bool:
    """Whether the Hessians of a level can be stored and factorised."""
    if not level.has_hessian:  # there is none to store
        return True
    own = y0.get(name) if problem.named and isinstance(y0, dict) else y0
    size = sum(math.prod(np.shape(leaf)[1:]) for leaf in jax.tree.leaves(own))
    if level.slots is not None or problem.count * size**2 > _MOST:
        return False
    rows = rows_of_a_visit(problem, sampler.batch_size)
    return size <= _NARROW or sampler.per_step * size**2 * (rows + size) <= _MOST_WORK
