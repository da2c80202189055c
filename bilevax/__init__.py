"""Stochastic multi-block bilevel optimization in JAX."""

from bilevax import theory
from bilevax._problem.dot import dot
from bilevax._problem.levels import argmin, mean
from bilevax._problem.problem import Problem
from bilevax._problem.rows import Batch, PerBlock, Rows, Shared
from bilevax._problem.stream import Stream
from bilevax._run.checkpoint import CheckpointError
from bilevax._run.chunks import advance
from bilevax._run.logs import JsonLines, Log, TensorBoard
from bilevax._run.memory_estimate import MemoryEstimate, memory_estimate
from bilevax._run.minimize import minimize
from bilevax._run.outcome import DivergedError, Outcome
from bilevax._run.run import Best, Result
from bilevax._run.sweep import Sweep, grid, sweep
from bilevax._step.averaging import averaged
from bilevax._step.oracles import Oracles
from bilevax.diagnostics import Residuals, hypergradient, objective, residuals, solve_lower
from bilevax.solvers import (
    KSONG,
    MMBO,
    MSVR,
    RSVRB,
    SOBA,
    SONG,
    BlockPAGE,
    BlockSAGA,
    BSVRBv1,
    BSVRBv2,
    Info,
    Recipe,
    State,
)
from bilevax.solvers.restart import Restart
from bilevax.version import __version__ as __version__

__all__ = [
    "KSONG",
    "MMBO",
    "MSVR",
    "RSVRB",
    "SOBA",
    "SONG",
    "BSVRBv1",
    "BSVRBv2",
    "Batch",
    "Best",
    "BlockPAGE",
    "BlockSAGA",
    "CheckpointError",
    "DivergedError",
    "Info",
    "JsonLines",
    "Log",
    "MemoryEstimate",
    "Oracles",
    "Outcome",
    "PerBlock",
    "Problem",
    "Recipe",
    "Residuals",
    "Restart",
    "Result",
    "Rows",
    "Shared",
    "State",
    "Stream",
    "Sweep",
    "TensorBoard",
    "advance",
    "argmin",
    "averaged",
    "dot",
    "grid",
    "hypergradient",
    "mean",
    "memory_estimate",
    "minimize",
    "objective",
    "residuals",
    "solve_lower",
    "sweep",
    "theory",
]
