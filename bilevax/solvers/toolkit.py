"""What a method, a tracker or a data source of your own needs. docs/own_method.md shows how they fit.

- a method: `Recipe` over the one step, or `AbstractSolver` for anything else that takes steps;
- a tracker: `Tracker`, or one of those that exist, with `Visit`, `Look`, `Rates`, `Memory` and `Moving`;
- the functions of a problem, block by block: `BlockView` and `each_block`;
- estimators, small linear algebra and pytree arithmetic.
"""

from bilevax._problem.levels import Level
from bilevax._problem.problem import Problem
from bilevax._problem.rows import Batch, Rows
from bilevax._problem.sampling import Sample, Sampler
from bilevax._problem.stream import Stream
from bilevax._problem.view import BlockView, each_block
from bilevax._step.clocks import Clock, Clocks, CompensatedSum
from bilevax._step.coefficients import Coefficient, LowerStep, evaluate
from bilevax._step.estimators import moving_average, msvr, msvr_gamma, storm
from bilevax._step.lagrangian import Gradients, Point, gradients, hessians, lagrangian, upper_gradients
from bilevax._step.linear_algebra import flatten_slots, raise_eigenvalues, solve, unflatten_slots
from bilevax._step.oracles import Oracles
from bilevax._step.slots import Memory, Moving, project_ball
from bilevax._step.state import Info, State
from bilevax._step.trackers import Descent, Identity, Optimised, TrackedHessian, TrackedSolve, Tracker, track
from bilevax._step.visit import Look, Rates, Visit
from bilevax._util import checks
from bilevax._util.trees import combine, norm, result_dtype, step_along, where_slot, zeros_like
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.upper import UpperStep

__all__ = [
    "AbstractSolver",
    "Batch",
    "BlockView",
    "Clock",
    "Clocks",
    "Coefficient",
    "CompensatedSum",
    "Descent",
    "Gradients",
    "Identity",
    "Info",
    "Level",
    "Look",
    "LowerStep",
    "Memory",
    "Moving",
    "Optimised",
    "Oracles",
    "Point",
    "Problem",
    "Rates",
    "Recipe",
    "Rows",
    "Sample",
    "Sampler",
    "State",
    "Stream",
    "TrackedHessian",
    "TrackedSolve",
    "Tracker",
    "UpperStep",
    "Visit",
    "checks",
    "combine",
    "each_block",
    "evaluate",
    "flatten_slots",
    "gradients",
    "hessians",
    "lagrangian",
    "moving_average",
    "msvr",
    "msvr_gamma",
    "norm",
    "project_ball",
    "raise_eigenvalues",
    "result_dtype",
    "solve",
    "step_along",
    "storm",
    "track",
    "unflatten_slots",
    "upper_gradients",
    "where_slot",
    "zeros_like",
]
