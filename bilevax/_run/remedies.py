"""What to try where a run did not end well, in the words of `minimize`."""

from __future__ import annotations

from typing import Any

import jax

from bilevax._problem.problem import Problem
from bilevax._problem.rows import PerBlock, Shared
from bilevax._problem.sampling import Sampler
from bilevax._run.knobs import Knobs, is_number, rounded, shown
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.block_newton import BlockNewton

_MOST_ENTRIES = 2**27  # of all Hessians together, up to which Newton steps are worth a try


def newton_steps(problem: Problem, y: PyTree, solver: AbstractSolver | None) -> list[str]:
    """The method that does not mind badly conditioned lower problems, where it is another, and fits."""
    sizes = [
        sum(leaf[0].size for leaf in jax.tree.leaves(y[name]))
        for name, level in problem.levels.items()
        if level.has_hessian
    ]
    if solver is None or isinstance(solver, BlockNewton) or not sizes:
        return []
    return ["solver=bx.BlockNewton()"] if problem.count * max(sizes) ** 2 <= _MOST_ENTRIES else []


def less_noise(problem: Problem, sampler: Sampler) -> list[str]:
    """Larger samples, where there are blocks or rows that a step does not see."""
    found = []
    if sampler.per_step < sampler.blocks:
        found.append(
            f"blocks_per_step={min(4 * sampler.per_step, sampler.blocks)} instead of {sampler.per_step}"
        )
    rows = [rows for rows in (problem.upper_data, *problem.lower_data) if rows is not None]
    if sampler.batch_size is not None and rows:
        found.append(f"batch_size={_more_rows(problem, sampler.batch_size)} instead of {sampler.batch_size}")
    return found


def _more_rows(problem: Problem, batch_size: int) -> int | str:
    """Four times as many rows, or all."""
    sources = [rows for rows in (problem.upper_data, *problem.lower_data) if rows is not None]
    most = [
        source.longest if isinstance(source, PerBlock) else source.count
        for source in sources
        if isinstance(source, (Shared, PerBlock))
    ]
    return 4 * batch_size if not most or 4 * batch_size < max(most) else '"all"'


def has_automatic_step(solver: AbstractSolver | None) -> bool:
    """Whether the upper step was left out; of a solver that is not known, none was chosen."""
    return _upper_step(solver) is None


def another_step(solver: AbstractSolver | None, times: float) -> str:
    """A shorter or longer upper step than that of a solver."""
    given = _upper_step(solver)
    if given is None:
        name = "…" if solver is None else type(solver).__name__
        return f"solver=bx.{name}(upper_step=bx.automatic_step(speed={times:g}))"
    if is_number(given):
        return f"upper_step={rounded(times * float(given)):g} instead of {shown(given)} (or leave it out)"
    return (
        f"{'shorter' if times < 1 else 'longer'} steps of the optax transformation (or leave upper_step out)"
    )


def joined(choices: list[str]) -> str:
    """Choices as a sentence lists them."""
    return ", ".join(choices[:-1]) + (", or " if choices[1:] else "") + choices[-1]


def _upper_step(solver: AbstractSolver | None) -> Any:
    knobs = None if solver is None else Knobs(solver)
    return None if knobs is None or "upper_step" not in knobs else knobs.values["upper_step"]
