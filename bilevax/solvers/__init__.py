"""The methods, one short file each, and what a method of your own needs.

`Recipe` is the base class of a method over the one step, `AbstractSolver` that of anything else that takes
steps. docs/own_method.md shows both.
"""

from bilevax._problem.levels import Level
from bilevax._problem.sampling import Sample, Sampler
from bilevax._problem.view import BlockView, each_block
from bilevax._step.clocks import Clock, Clocks, CompensatedSum
from bilevax._step.coefficients import Coefficient
from bilevax._step.estimators import moving_average, msvr, msvr_gamma, storm
from bilevax._step.lagrangian import Gradients, Point, gradients, hessians, lagrangian, upper_gradients
from bilevax._step.linear_algebra import flatten_slots, raise_eigenvalues, solve, unflatten_slots
from bilevax._step.oracles import Oracles
from bilevax._step.slots import Memory, Moving, project_ball
from bilevax._step.state import Info, State
from bilevax._step.trackers import Descent, Identity, TrackedHessian, TrackedSolve, Tracker, track
from bilevax._step.visit import Look, Rates, Visit
from bilevax._util.trees import combine, norm, step_along, where_slot, zeros_like
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.block_page import BlockPAGE
from bilevax.solvers.block_saga import BlockSAGA
from bilevax.solvers.bsvrb_v1 import BSVRBv1
from bilevax.solvers.bsvrb_v2 import BSVRBv2
from bilevax.solvers.ksong import KSONG
from bilevax.solvers.mmbo import MMBO
from bilevax.solvers.msvr import MSVR
from bilevax.solvers.recipe import Recipe
from bilevax.solvers.restart import Restart
from bilevax.solvers.rsvrb import RSVRB
from bilevax.solvers.soba import SOBA
from bilevax.solvers.song import SONG
from bilevax.solvers.upper import UpperStep

__all__ = [
    "KSONG",
    "MMBO",
    "MSVR",
    "RSVRB",
    "SOBA",
    "SONG",
    "AbstractSolver",
    "BSVRBv1",
    "BSVRBv2",
    "BlockPAGE",
    "BlockSAGA",
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
    "Memory",
    "Moving",
    "Oracles",
    "Point",
    "Rates",
    "Recipe",
    "Restart",
    "Sample",
    "Sampler",
    "State",
    "TrackedHessian",
    "TrackedSolve",
    "Tracker",
    "UpperStep",
    "Visit",
    "combine",
    "each_block",
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
    "solve",
    "step_along",
    "storm",
    "track",
    "unflatten_slots",
    "upper_gradients",
    "where_slot",
    "zeros_like",
]
