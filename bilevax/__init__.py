"""Stochastic multi-block bilevel optimization in JAX."""

from bilevax.diagnostics import hypergradient, objective, residuals, solve_lower
from bilevax.minimize import Result, advance, minimize
from bilevax.problem import Problem, argmin, mean
from bilevax.restart import Restart
from bilevax.rows import Batch, PerBlock, Rows, Shared
from bilevax.solvers import KSONG, MMBO, MSVR, RSVRB, SOBA, SONG, BSVRBv1, BSVRBv2, Info, Recipe, State

__version__ = "0.1.0"
