"""Stochastic multi-block bilevel optimization in JAX."""

from bilevax import theory
from bilevax._problem.dot import dot
from bilevax._problem.folds import Folds
from bilevax._problem.levels import argmin, mean
from bilevax._problem.own import maximum, minimum
from bilevax._problem.problem import Problem
from bilevax._problem.risk import cvar, soft_maximum, worst_group
from bilevax._problem.rows import Batch, PerBlock, Rows, Shared
from bilevax._problem.saddle import saddle
from bilevax._problem.sampling import Sampling
from bilevax._problem.stream import Stream
from bilevax._problem.streamed import Streamed
from bilevax._run.checkpoint import Checkpoint, CheckpointError
from bilevax._run.chunks import advance
from bilevax._run.finish_report import Finish
from bilevax._run.history import History
from bilevax._run.logs import JsonLines, Log, TensorBoard
from bilevax._run.memory_estimate import MemoryEstimate, memory_estimate
from bilevax._run.minimize import minimize
from bilevax._run.outcome import DivergedError, Outcome
from bilevax._run.program_cache import program_cache
from bilevax._run.progress import Progress, make_progress
from bilevax._run.recovery import Recovery, RecoveryWarning
from bilevax._run.run import Best, Result
from bilevax._run.settings import Settings
from bilevax._run.stop import Stop
from bilevax._run.sweep import Sweep, grid, sweep
from bilevax._run.tune import Trial, Tuned, tune
from bilevax._run.verification import AccuracyWarning, Verification, verify
from bilevax._step.averaging import averaged
from bilevax._step.bounded import bounded
from bilevax._step.lazy_adam import lazy_adam
from bilevax._step.oracles import Oracles
from bilevax._step.pace import automatic_step
from bilevax._step.state import Info, State
from bilevax._truth.adaptation import adapt
from bilevax._util import checks
from bilevax._util.compiler import warn_of_wrong_sums
from bilevax._util.per_entry import PerEntry
from bilevax.diagnostics import (
    Evaluation,
    Residuals,
    hypergradient,
    objective,
    residuals,
    solve_lower,
    value_and_hypergradient,
)
from bilevax.solvers import (
    F2SA,
    F3SA,
    KSONG,
    MASOBA,
    MMBO,
    MSVR,
    RSVRB,
    SOBA,
    SONG,
    AbstractSolver,
    BlockNewton,
    BlockPAGE,
    BlockSAGA,
    BSVRBv1,
    BSVRBv2,
    Recipe,
    Restart,
)
from bilevax.version import __version__

__all__ = [
    "F2SA",
    "F3SA",
    "KSONG",
    "MASOBA",
    "MMBO",
    "MSVR",
    "RSVRB",
    "SOBA",
    "SONG",
    "AbstractSolver",
    "AccuracyWarning",
    "BSVRBv1",
    "BSVRBv2",
    "Batch",
    "Best",
    "BlockNewton",
    "BlockPAGE",
    "BlockSAGA",
    "Checkpoint",
    "CheckpointError",
    "DivergedError",
    "Evaluation",
    "Finish",
    "Folds",
    "History",
    "Info",
    "JsonLines",
    "Log",
    "MemoryEstimate",
    "Oracles",
    "Outcome",
    "PerBlock",
    "PerEntry",
    "Problem",
    "Progress",
    "Recipe",
    "Recovery",
    "RecoveryWarning",
    "Residuals",
    "Restart",
    "Result",
    "Rows",
    "Sampling",
    "Settings",
    "Shared",
    "State",
    "Stop",
    "Stream",
    "Streamed",
    "Sweep",
    "TensorBoard",
    "Trial",
    "Tuned",
    "Verification",
    "__version__",
    "adapt",
    "advance",
    "argmin",
    "automatic_step",
    "averaged",
    "bounded",
    "checks",
    "cvar",
    "dot",
    "grid",
    "hypergradient",
    "lazy_adam",
    "make_progress",
    "maximum",
    "mean",
    "memory_estimate",
    "minimize",
    "minimum",
    "objective",
    "program_cache",
    "residuals",
    "saddle",
    "soft_maximum",
    "solve_lower",
    "sweep",
    "theory",
    "tune",
    "value_and_hypergradient",
    "verify",
    "worst_group",
]


warn_of_wrong_sums()


def __dir__() -> list[str]:
    return __all__
