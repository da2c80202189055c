"""Many runs as one program: settings and seeds side by side, compiled once."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.finite import check_finite
from bilevax._problem.problem import Problem
from bilevax._problem.row_means import check_row_means
from bilevax._problem.sampling import Sampling, as_sampling
from bilevax._run.many_runs import ManyRuns, Metric, many_runs
from bilevax._run.progress import Progress, make_progress
from bilevax._run.run import as_number, checked_steps
from bilevax._step.state import State
from bilevax._util import checks
from bilevax._util.trees import PyTree, all_finite
from bilevax.solvers.base import AbstractSolver
from bilevax.solvers.offsets import with_offsets
from bilevax.solvers.start_checks import check_feasible

Columns = dict[str, np.ndarray]


def grid(**choices: Sequence[float]) -> Columns:
    """Every combination of some choices: columns by name, the last one running fastest.

    Example:
      >>> import bilevax as bx
      >>> {name: column.tolist() for name, column in bx.grid(upper_step=[0.1, 1.0], alpha=[0.5, 0.9]).items()}
      {'upper_step': [0.1, 0.1, 1.0, 1.0], 'alpha': [0.5, 0.9, 0.5, 0.9]}
    """
    columns = list(zip(*itertools.product(*choices.values()), strict=True))
    if not columns:
        raise ValueError(f"grid needs at least one choice for every name, got {choices}")
    return {name: np.asarray(column) for name, column in zip(choices, columns, strict=True)}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What `sweep` returns; R settings and S seeds.

    Attributes:
      settings: the settings, columns of length R.
      x: the upper variables at the end, with leading axes (R, S); averages, if the upper step is `averaged`.
      y: the lower variables at the end, caught up, likewise.
      history: "objective" (the mean of f since the entry before), "gradient_norm" (‖z‖) and the metrics, each
        of shape (R, S, entries). A run that diverges continues as NaN, and affects no other.
      step: the steps at which the entries were taken.
      seconds: the time of all runs together until then, compilation left out.
      compile_seconds: time to trace, compile and start.
    """

    settings: Columns
    x: PyTree
    y: PyTree
    history: dict[str, np.ndarray]
    step: np.ndarray
    seconds: np.ndarray
    compile_seconds: float

    def scores(self, name: str, last: int = 1) -> np.ndarray:
        """A metric of every setting: the mean over seeds and the last entries, infinite if a run diverged."""
        if name not in self.history:
            raise KeyError(f"no {name!r} in the history, which has {sorted(self.history)}")
        values = self.history[name][:, :, -last:].mean((1, 2))
        return np.where(np.isfinite(values), values, np.inf)

    def best(self, name: str, last: int = 1) -> dict[str, float]:
        """The setting with the least mean of a metric.

        Raises:
          ValueError: if every setting diverged.
        """
        scores = self.scores(name, last)
        if not np.isfinite(scores).any():
            raise ValueError(f"{name!r} is not finite for any of the {len(scores)} settings: all diverged")
        return {key: float(column[np.argmin(scores)]) for key, column in self.settings.items()}


def sweep(
    problem: Problem | Sequence[Problem],
    x0: PyTree,
    y0: PyTree = None,
    *,
    solver: Callable[..., AbstractSolver],
    settings: Mapping[str, Sequence[float]],
    steps: int,
    keys: Array,
    sampling: Sampling | None = None,
    blocks_per_step: int | Literal["all"] | None = None,
    batch_size: int | Literal["all"] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    every: int | None = None,
    progress: str | Progress | None = "auto",
) -> Sweep:
    """Runs a method with many settings and seeds at once: one vmapped program, one compilation.

    Args:
      problem: what to solve; or one problem per seed, all of the same shapes.
      x0: where x starts.
      y0: where the lower variables start; see `minimize`.
      solver: makes the solver of a setting, `solver(**setting)`: `bx.BSVRBv2`, or a function that builds one
        with an optax transformation, a schedule or fixed arguments. It is called with traced values.
      settings: equally long columns by name; see `grid`.
      steps: how many steps every run takes.
      keys: an array of random keys, one per seed.
      sampling: how blocks and rows are drawn.
      blocks_per_step: I, the blocks a step visits, or "all", as in `Sampling`, for short.
      batch_size: B, the rows per visited block, or "all", as in `Sampling`, for short.
      metrics: functions of (problem, state); each returns one number. Those that JAX can trace are measured
        for all runs at once, others (such as `bx.objective`) for one run after another, which takes longer.
        Where one of those raises a RuntimeError, its value is NaN, with a warning.
      every: steps between two entries of the history; left out, a hundredth of the run.
      progress: as in `minimize`; the metrics shown are the best of all settings.

    Returns:
      A `Sweep`.

    Example:
      >>> import bilevax as bx, jax, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.arange(8.0).reshape(4, 2),
      ... )
      >>> found = bx.sweep(
      ...     problem, jnp.zeros(2), jnp.zeros((4, 2)),
      ...     solver=bx.BSVRBv2, settings=bx.grid(upper_step=[0.001, 0.1]), steps=200,
      ...     keys=jax.random.split(jax.random.key(0), 3), progress=None,
      ... )
      >>> found.history["objective"].shape
      (2, 3, 100)
      >>> found.best("objective")
      {'upper_step': 0.1}
    """
    began = time.perf_counter()
    steps = checked_steps(steps, 1)
    every = max(1, steps // 100) if every is None else checks.whole_number("every", every, 1)
    columns = _checked_settings(settings)
    count = len(next(iter(columns.values())))
    seeds = np.shape(keys)[0] if np.ndim(keys) == 1 and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else 0
    if not seeds:
        raise ValueError("keys must be an array of random keys, such as jax.random.split(key, 5)")
    sampling = as_sampling(sampling, blocks_per_step, batch_size)
    many = not isinstance(problem, Problem)
    problems = list(problem) if many else [problem]
    if many and len(problems) != seeds:
        raise ValueError(f"problem must be one problem or one per key, got {len(problems)} for {seeds} keys")
    sampler = sampling.sampler(problems[0], keys[0])
    for row in range(count):
        made = solver(**{name: column[row].item() for name, column in columns.items()})
        checks.solver(made, AbstractSolver)
        made.check(problems[0], sampler)
    for one in problems:
        check_finite(one, x0, y0)
    check_row_means(problems[0], x0, y0)
    check_feasible(problems[0], y0)
    first = solver(**{name: column[0].item() for name, column in columns.items()})
    centres = with_offsets(problems[0], first, x0, y0, sampler).centre_functions  # as in `minimize`
    problems = [one.with_centres(centres) for one in problems]
    stacked = _stack(problems) if many else problems[0]
    display = make_progress(progress, steps)

    runs = many_runs(solver, sampling, dict(metrics or {}), many)
    numbers = {name: jnp.asarray(column, float) for name, column in columns.items()}
    states = jax.block_until_ready(runs.start(stacked, numbers, x0, y0, keys))
    states, _, _ = jax.block_until_ready(runs.advance(stacked, numbers, states, 0))
    measures = {
        name: _measure(name, metric, runs, problems, stacked, states)
        for name, metric in (metrics or {}).items()
    }
    compile_seconds = time.perf_counter() - began

    entries, at, seconds, running = [], [], [], 0.0
    with display:
        for begin in range(0, steps, every):
            tick = time.perf_counter()
            states, objective, size = runs.advance(stacked, numbers, states, min(every, steps - begin))
            measured = {name: measure(states) for name, measure in measures.items()}
            entry = jax.device_get({"objective": objective} | measured | {"gradient_norm": size})
            running += time.perf_counter() - tick
            entries.append(entry)
            at.append(min(begin + every, steps))
            seconds.append(running)
            best = {name: _least(values) for name, values in entry.items()}
            display.update(at[-1], at[-1] * count * seeds / running, best)
    history = {name: np.stack([entry[name] for entry in entries], -1) for name in entries[0]}
    y = _all_y(states)
    return Sweep(columns, states.average, y, history, np.asarray(at), np.asarray(seconds), compile_seconds)


_all_y = jax.jit(jax.vmap(jax.vmap(lambda state: state.y)))


def _measure(
    name: str, metric: Metric, runs: ManyRuns, problems: list[Problem], stacked: Problem, states: State
) -> Callable[[State], Any]:
    """A metric of the states of all runs: one program if JAX can trace it, else run by run."""
    try:
        value = jax.block_until_ready(runs.metrics[name](stacked, states))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return _RunByRun(name, metric, problems)
    shape, axes = np.shape(value), np.ndim(states.step)
    if shape[:axes] != shape:
        raise TypeError(f"metrics[{name!r}] must return one number, got shape {shape[axes:]}")
    return lambda states: runs.metrics[name](stacked, states)


@dataclasses.dataclass
class _RunByRun:
    """A metric that needs concrete values: it is called for one run after another."""

    name: str
    metric: Metric
    problems: list[Problem]
    warned: bool = False

    def __call__(self, states: State) -> np.ndarray:
        settings, seeds = np.shape(states.step)
        values = [[self._one(states, row, seed) for seed in range(seeds)] for row in range(settings)]
        return np.asarray(values)

    def _one(self, states: State, row: int, seed: int) -> float:
        state = jax.tree.map(lambda leaf: leaf[row, seed], states).settled
        if not bool(all_finite((state.x, state.y))):
            return np.nan
        try:
            return as_number(self.name, self.metric(self.problems[seed % len(self.problems)], state))
        except RuntimeError as error:
            if not self.warned:
                where = f"setting {row} and seed {seed} at step {int(state.step)}"
                warnings.warn(f"metrics[{self.name!r}] is NaN for {where}: {error}", stacklevel=3)
                self.warned = True
            return np.nan


def _least(values: np.ndarray) -> float:
    """The least finite mean over the seeds."""
    means = np.asarray(values, float).mean(1)
    return float(np.min(means, where=np.isfinite(means), initial=np.inf))


def _stack(problems: list[Problem]) -> Problem:
    try:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the problems of a sweep must have the same functions and shapes: {error}"
        ) from error


def _checked_settings(settings: Mapping[str, Any]) -> Columns:
    if not isinstance(settings, Mapping) or not settings:
        raise TypeError(
            f"settings must be a dict of columns, such as grid(upper_step=[0.1, 1.0]), got {settings!r}"
        )
    columns = {name: np.asarray(column, float) for name, column in settings.items()}
    lengths = {name: column.shape for name, column in columns.items()}
    if any(len(shape) != 1 or shape[0] == 0 for shape in lengths.values()) or len(set(lengths.values())) > 1:
        raise ValueError(f"settings must be columns of one length, got shapes {lengths}")
    return columns
