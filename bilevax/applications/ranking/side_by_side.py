"""Many trainings as one program: other numbers and other seeds, side by side under vmap."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._run.chunks import advance
from bilevax._step.state import State
from bilevax._util import checks
from bilevax.applications.ranking.evaluation import Held, evaluate
from bilevax.applications.ranking.methods import (
    BILEVEL,
    Settings,
    checked_method,
    make_method,
    make_solver,
    steps_per_epoch,
    with_numbers,
)
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.start import start_levels
from bilevax.applications.ranking.training import WARM_UP, parse_metric

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Trainings:
    """What `train_many` returns, for R runs.

    Attributes:
      method: which.
      numbers: the columns of settings, each of length R.
      epochs: when the runs were measured.
      seconds: the time of all runs together until then, compilation left out.
      dev: (R, entries) the watched metric on development data.
      best_epoch: (R,) where it was largest.
      x: the parameters there, with leading axis R.
      test: per metric (R, users) on test data there; empty without test data.
      compile_seconds: time to trace and compile.
    """

    method: str
    numbers: dict[str, np.ndarray]
    epochs: np.ndarray
    seconds: np.ndarray
    dev: np.ndarray
    best_epoch: np.ndarray
    x: PyTree
    test: dict[str, np.ndarray]
    compile_seconds: float

    def means(self, metric: str) -> np.ndarray:
        """A test metric of every run, over users."""
        return np.nanmean(self.test[metric], axis=1)


def train_many(
    ratings: Ratings,
    model: Any,
    method: str,
    settings: Settings | None = None,
    numbers: Mapping[str, Sequence[float] | np.ndarray] | None = None,
    *,
    keys: Array,
    epochs: int,
    dev: Held,
    test: Held | None = None,
    x0: PyTree = None,
    warm_up: int = 0,
    every: int = 5,
    watch: str = "ndcg@10",
    cutoffs: Sequence[int] = (10, 20, 50),
) -> Trainings:
    """Trains R models at once, each from its own start, and keeps the best of each by development data.

    Args:
      ratings: the training pairs.
      model: a model with `start`.
      method: one of `METHODS`.
      settings: what all runs have in common.
      numbers: columns of length R of settings that differ; only numbers, not sizes or names.
      keys: R random keys.
      epochs: how often every user is visited.
      dev: development data.
      test: test data, looked at once, at every run's best epoch.
      x0: where the parameters of the R runs start, with leading axis R; left out, `model.start` of each key.
      warm_up: epochs of softmax cross-entropy before that.
      every: epochs between two measurements.
      watch: the metric to choose by.
      cutoffs: the k of the test metrics.

    Returns:
      A `Trainings`.

    Raises:
      ValueError: if columns and keys have different lengths.
    """
    settings = Settings() if settings is None else settings
    checked_method(method)
    checks.whole_number("epochs", epochs, 1)
    every = checks.whole_number("every", every, 1)
    columns = {name: jnp.asarray(column, jnp.float32) for name, column in (numbers or {}).items()}
    runs = keys.shape[0]
    for name, column in columns.items():
        if column.shape != (runs,):
            raise ValueError(
                f"numbers[{name!r}] must have one entry per key, {runs}, got shape {column.shape}"
            )
    _, cutoff = parse_metric(watch)
    for k in (cutoff, *cutoffs):
        checks.whole_number("every cutoff", k, 1, ratings.item_count)
    per_epoch = steps_per_epoch(ratings.users, settings)
    programs = _Programs(model, settings, per_epoch, epochs, watch, cutoff)
    began = time.perf_counter()
    x, keys = programs.begin(keys)
    x = x if x0 is None else x0
    if warm_up:
        problem, _ = make_method(WARM_UP, ratings, model, settings, 1)
        states = programs.start(WARM_UP, problem, columns, x, keys)
        states = programs.advance(WARM_UP, problem, columns, states, warm_up * per_epoch)
        x = jax.block_until_ready(states.average)
    problem, _ = make_method(method, ratings, model, settings, epochs * per_epoch)
    states = programs.start(method, problem, columns, x, keys)
    states = programs.advance(method, problem, columns, states, 0)
    jax.block_until_ready(programs.measure(states.average, dev, _nothing_yet(states.x, runs), jnp.asarray(0)))
    best = _nothing_yet(states.x, runs)
    compile_seconds = time.perf_counter() - began

    at, seconds, curves, running = [], [], [], 0.0
    for epoch in range(every, epochs + every, every):
        epoch = min(epoch, epochs)
        tick = time.perf_counter()
        taken = epoch - (at[-1] if at else 0)
        states = programs.advance(method, problem, columns, states, taken * per_epoch)
        jax.block_until_ready(states.x)
        running += time.perf_counter() - tick
        best = programs.measure(states.average, dev, best, jnp.asarray(epoch))
        at.append(epoch)
        seconds.append(running)
        curves.append(np.asarray(best.last))
    found = {}
    if test is not None:
        found = jax.device_get(programs.judge(best.x, test, tuple(cutoffs)))
    return Trainings(
        method,
        {name: np.asarray(column) for name, column in columns.items()},
        np.asarray(at),
        np.asarray(seconds),
        np.stack(curves, axis=1),
        np.asarray(best.epoch),
        best.x,
        found,
        compile_seconds,
    )


class _Best(eqx.Module):
    x: PyTree
    value: Array
    epoch: Array
    last: Array


def _nothing_yet(x: PyTree, runs: int) -> _Best:
    nothing = jnp.full(runs, -jnp.inf)
    return _Best(jax.tree.map(jnp.copy, x), nothing, jnp.zeros(runs, jnp.int32), nothing)


class _Programs:
    """The compiled parts; the problem is an argument of each, with its data, and is never compiled in."""

    def __init__(
        self, model: Any, settings: Settings, per_epoch: int, epochs: int, watch: str, cutoff: int
    ) -> None:
        steps = per_epoch * epochs

        def of_run(method: str, problem: Problem, numbers: dict[str, Array]) -> tuple[Problem, Any]:
            own = settings.replace(**numbers)
            return with_numbers(problem, own), make_solver(method, problem.count, own, steps)

        def begin(key: Array) -> tuple[PyTree, Array]:
            first, rest = jax.random.split(key)
            return model.start(first), rest

        def start(method: str, problem: Problem, numbers: dict[str, Array], x: PyTree, key: Array) -> State:
            problem, solver = of_run(method, problem, numbers)
            levels, go = jax.random.split(key)
            y0: Any = {"nothing": None}
            if method in BILEVEL:
                y0 = start_levels(problem, model, x, levels, settings.negatives)
            plan = {
                "blocks_per_step": min(settings.users_per_step, problem.count),
                "batch_size": settings.negatives,
                "initial_batch_size": 0,
            }
            return solver.init(problem, x, y0, key=go, **plan)

        def go_on(
            method: str, problem: Problem, numbers: dict[str, Array], state: State, steps: Array
        ) -> State:
            problem, solver = of_run(method, problem, numbers)
            return advance(problem, solver, state, steps)

        def measure(x: PyTree, held: Held, best: _Best, epoch: Array) -> _Best:
            value = jnp.nanmean(evaluate(model, x, held, (cutoff,))[watch])
            better = value > best.value
            kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), x, best.x)
            return _Best(
                kept, jnp.where(better, value, best.value), jnp.where(better, epoch, best.epoch), value
            )

        self.begin = jax.jit(jax.vmap(begin))
        self.start = eqx.filter_jit(_over_runs(start, (None, 0, 0, 0)))
        self._advance = eqx.filter_jit(_over_runs(go_on, (None, 0, 0, None)))
        self.measure = eqx.filter_jit(jax.vmap(measure, in_axes=(0, None, 0, None)))
        self.judge = eqx.filter_jit(
            lambda x, held, cutoffs: jax.vmap(lambda x: evaluate(model, x, held, cutoffs))(x)
        )

    def advance(self, method: str, problem: Problem, numbers: Any, states: State, steps: int) -> State:
        """So many steps of every run."""
        return self._advance(method, problem, numbers, states, jnp.asarray(steps))


def _over_runs(function: Any, axes: tuple[Any, ...]) -> Any:
    def mapped(method: str, *arguments: Any) -> Any:
        return jax.vmap(lambda *arguments: function(method, *arguments), in_axes=axes)(*arguments)

    return mapped
