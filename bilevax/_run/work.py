"""The work of a step in the units in which that of exact solutions is counted: numbers that are read."""

from __future__ import annotations

import jax

from bilevax._problem.problem import Problem
from bilevax._run.chunks import work_of_a_step
from bilevax._step.state import State
from bilevax.solvers.base import AbstractSolver

_MANY = 1000  # steps, whose first pass is a small part of them


def whole_work_of_a_step(solver: AbstractSolver, problem: Problem, state: State) -> float:
    """About how many numbers a step reads; a Hessian reads those of its block as often as y has entries."""
    asked = solver.count_oracles(problem, state.sampler, _MANY)
    matrices = 0.0 if asked is None else asked.matrices / (_MANY * state.sampler.per_step)
    passes = 1 + matrices * sum(leaf[0].size for leaf in jax.tree.leaves(state.y))
    return passes * work_of_a_step(problem, state)
