"""Hyper-parameters by successive halving: many runs side by side, judged by the exact F of some blocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import Array

from bilevax._problem.finite import check_finite
from bilevax._problem.problem import Problem
from bilevax._problem.row_means import check_row_means
from bilevax._problem.sampling import Sampling, as_sampling
from bilevax._run.contest import Contest, Heat, Record
from bilevax._run.judge import Judge
from bilevax._run.many_runs import Make
from bilevax._run.progress import Progress, make_progress
from bilevax._run.run import checked_steps
from bilevax._run.tuning_grid import changed, combinations, default_grid, same_program, static_names
from bilevax._run.verification import AccuracyWarning
from bilevax._step.state import State
from bilevax._truth.few_blocks import require_slot_per_block
from bilevax._util import checks, extras
from bilevax._util.trees import PyTree
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.default import chosen_solver
from bilevax.solvers.start_checks import check_feasible

_LAST = 2  # trials that go the whole way, at least


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting that `tune` has tried.

    Attributes:
      settings: its hyper-parameters.
      objective: F after each rung that it reached, on the blocks of the judgement; NaN where it diverged.
      steps: the steps that it took.
      outcome: "finished", "dropped" (others were better), "diverged", or "unsolved" (its lower problems
        could not be solved).
    """

    settings: dict[str, Any]
    objective: tuple[float, ...]
    steps: int
    outcome: str


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` returns. Prints as a table of the trials.

    Attributes:
      solver: the best solver, to give to `minimize`.
      settings: the hyper-parameters that it was made with.
      objective: the exact F of its run at the end, on the blocks of the judgement.
      start: the same at x0.
      x: the upper variable at the end of the best run; its average, if the upper step is `averaged`.
      y: the lower variables of that run, caught up.
      state: its whole state, from which `advance` can go on.
      trials: all trials, the best first.
      rungs: the steps after which trials were judged.
      blocks: the numbers of the blocks that were solved.
    """

    solver: AbstractSolver
    settings: dict[str, Any]
    objective: float
    start: float
    x: PyTree
    y: PyTree
    state: State
    trials: list[Trial]
    rungs: tuple[int, ...]
    blocks: np.ndarray

    def frame(self) -> Any:
        """The trials as a pandas frame, the best first; F after n steps is in the column "F after n"."""
        return extras.required("pandas", "a frame", "data").DataFrame(list(self._rows()))

    def __str__(self) -> str:
        rows = [{name: _word(value) for name, value in row.items()} for row in self._rows()]
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        return "\n".join([f"F of {len(self.blocks)} blocks, {self.start:.6g} at x0", *table])

    def _rows(self) -> Iterator[dict[str, Any]]:
        for trial in self.trials:
            after = itertools.zip_longest(self.rungs, trial.objective)
            judged = {f"F after {steps}": value for steps, value in after}
            yield trial.settings | judged | {"outcome": trial.outcome}


def tune(
    problem: Problem,
    x0: PyTree,
    y0: PyTree = None,
    *,
    solver: AbstractSolver | Make | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    steps: int,
    key: Array | None = None,
    sampling: Sampling | None = None,
    blocks_per_step: int | None = None,
    batch_size: int | None = None,
    blocks: int | None = None,
    rungs: int = 3,
    progress: str | Progress | None = "auto",
) -> Tuned:
    """Finds the best hyper-parameters of a solver by successive halving.

    All combinations of a grid start as runs side by side. After a quarter of the steps the better half goes
    on, and again after half of them; at least two go the whole way. They are judged by F itself: some blocks,
    the same for all trials, are solved on all their rows. The f that runs track may be far from F, and is not
    used. Trials that diverge are dropped.

    Args:
      problem: what to solve.
      x0: where x starts.
      y0: where the lower variables start; see `minimize`.
      solver: the solver whose hyper-parameters are replaced, such as `BSVRBv2()`, or a function that makes
        one from keywords, `solver(**setting)`; left out, as in `minimize`.
      grid: values by hyper-parameter; all combinations are tried. Combinations that differ in numbers only
        are one compiled program; None, schedules and optax transformations are allowed too. The name "speed"
        stands for `upper_step=automatic_step(speed=…)`, unless `solver` is a function. Left out, speeds from
        0.1 to 10, or 0.1 to 10 times the `upper_step` of the solver.
      steps: how many steps the best trials take.
      key: the random key of all runs; the same key gives the same result; left out, `jax.random.key(0)`.
      sampling: how blocks and rows are drawn.
      blocks_per_step: I, the blocks a step visits, as in `Sampling`, for short.
      batch_size: B, the rows per visited block, as in `Sampling`, for short.
      blocks: how many blocks to solve in order to judge; left out, 64, all if there are fewer, and fewer if
        they have many rows.
      rungs: how often trials are judged. 1 runs all of them to the end.
      progress: as in `minimize`.

    Returns:
      A `Tuned`. Its `solver` is ready for `minimize`, which with the same key and steps repeats the best run
      up to rounding, which long runs in float32 amplify.

    Raises:
      ValueError: if no trial is left, or a lower level has slots of its own.

    Warns:
      AccuracyWarning: if F is larger at the end of the best run than at x0.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> tuned = bx.tune(
      ...     problem, jnp.zeros(2), jnp.zeros((4, 2)), solver=bx.BSVRBv2(),
      ...     grid={"upper_step": [0.001, 0.1]}, steps=200, progress=None,
      ... )
      >>> tuned.settings, round(tuned.objective, 2)
      ({'upper_step': 0.1}, 10.0)
    """
    steps, rungs = checked_steps(steps, 1), checks.whole_number("rungs", rungs, 1, 20)
    key = jax.random.key(0) if key is None else key
    sampling = as_sampling(sampling, blocks_per_step, batch_size)
    base, make = _base_and_maker(problem, solver, y0, sampling, key)
    settings = combinations(default_grid(base) if grid is None else grid)
    sampler = sampling.sampler(problem, key)
    solvers = [make(**setting) for setting in settings]
    for made in solvers:
        checks.solver(made, AbstractSolver)
        made.check(problem, sampler)
    check_finite(problem, x0, y0)
    check_row_means(problem, x0, y0)
    check_feasible(problem, y0)
    require_slot_per_block(problem, "tune")
    blocks = None if blocks is None else checks.whole_number("blocks", blocks, 1)
    display = make_progress(progress, steps)
    groups = same_program(settings, static_names(base))
    heats = [Heat(make, sampling, fixed, settings, members) for fixed, members in groups]
    for heat in heats:
        heat.start(problem, x0, y0, key)

    first = heats[0].state(0)
    judge = Judge(problem, jax.random.fold_in(key, 0), blocks, first.x, first.y)
    contest = Contest(problem, heats, judge, [Record() for _ in settings])
    ends = tuple(sorted({-(-steps // 2**halvings) for halvings in range(rungs)}))
    with display:
        for rung, end in enumerate(ends):
            contest.advance(end, max(1, steps // 50), display)
            contest.judge_all()
            if rung + 1 < len(ends):
                contest.keep(max(_LAST, -(-len(settings) // 2 ** (rung + 1))))

    best = contest.running[0]
    state, value = contest.state(best), contest.records[best].objective[-1]
    if judge.worse_than_start(state.average, state.y):
        warnings.warn(
            f"the best of {len(settings)} trials is worse than x0: F is {value:.4g}, and {judge.start:.4g} "
            "at x0: try smaller steps, more blocks_per_step, or a larger batch_size",
            AccuracyWarning,
            stacklevel=2,
        )
    pairs = sorted(zip(settings, contest.records, strict=True), key=lambda pair: pair[1].rank)
    trials = [Trial(one, tuple(record.objective), record.steps, record.outcome) for one, record in pairs]
    found = (solvers[best], settings[best], value, judge.start, state.average, state.y, state)
    return Tuned(*found, trials, ends, judge.blocks)


def _base_and_maker(
    problem: Problem, solver: Any, y0: PyTree, sampling: Sampling, key: Array
) -> tuple[AbstractSolver | None, Make]:
    """The solver whose hyper-parameters are replaced, if there is one, and what makes that of a setting."""
    if isinstance(solver, type):
        solver = solver()
    if callable(solver):
        return None, cast(Make, solver)
    base = chosen_solver(problem, solver, y0, sampling.sampler(problem, key))
    return base, functools.partial(changed, base)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, (int, str)):
        return "" if value is None else str(value)
    return getattr(value, "__name__", type(value).__name__)
