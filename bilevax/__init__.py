"""Stochastic multi-block bilevel optimization in JAX."""

from bilevax import theory
from bilevax.averaging import averaged
from bilevax.checkpoint import CheckpointError
from bilevax.chunks import advance
from bilevax.diagnostics import Residuals, hypergradient, objective, residuals, solve_lower
from bilevax.dot import dot
from bilevax.logs import JsonLines, Log, TensorBoard
from bilevax.memory_estimate import MemoryEstimate, memory_estimate
from bilevax.minimize import minimize
from bilevax.oracles import Oracles
from bilevax.outcome import DivergedError, Outcome
from bilevax.problem import Problem, argmin, mean
from bilevax.restart import Restart
from bilevax.rows import Batch, PerBlock, Rows, Shared
from bilevax.run import Best, Result
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
from bilevax.stream import Stream
from bilevax.sweep import Sweep, grid, sweep
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
