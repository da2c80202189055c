"""The solver of a run if none is given."""

from __future__ import annotations

import optax

from bilevax._problem.problem import Problem
from bilevax._util import checks
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.bsvrb_v2 import BSVRBv2


def chosen_solver(problem: Problem, solver: AbstractSolver | None) -> AbstractSolver:
    """The solver that was given, or the default one: BSVRB v2 with Adam on the tracked gradient."""
    if solver is None:
        return BSVRBv2(upper_step=optax.adam(1e-3))
    checks.solver(solver, AbstractSolver)
    return solver
