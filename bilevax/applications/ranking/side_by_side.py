"""Many trainings as one program: different settings and seeds, side by side under vmap."""

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

import bilevax as bx
from bilevax.applications.ranking.evaluation import evaluate
from bilevax.applications.ranking.held_out import Held
from bilevax.applications.ranking.methods import (
    TrainingSettings,
    checked_method,
    make_method,
    make_solver,
    steps_per_epoch,
    with_settings,
)
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.start import first_levels
from bilevax.applications.ranking.training import WARM_UP, parse_metric

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Trainings:
    """The result of `train_many`, for R runs.

    Attributes:
      method: its name.
      columns: the settings that differ between runs, each of length R.
      epochs: the epochs of the measurements.
      seconds: the time of all runs together up to each measurement, without compilation.
      dev: (R, measurements) the watched metric on development data.
      best_epoch: (R,) the epoch with the largest value.
      x: the parameters at the best epoch, with leading axis R.
      test: by metric, (R, users) on test data at the best epoch; empty without test data.
      compile_seconds: time to trace and compile.
    """

    method: str
    columns: dict[str, np.ndarray]
    epochs: np.ndarray
    seconds: np.ndarray
    dev: np.ndarray
    best_epoch: np.ndarray
    x: PyTree
    test: dict[str, np.ndarray]
    compile_seconds: float

    def means(self, metric: str) -> np.ndarray:
        """The mean over users of a test metric, for every run."""
        return np.nanmean(self.test[metric], axis=1)


def train_many(
    ratings: Ratings,
    model: Any,
    method: str,
    settings: TrainingSettings | None = None,
    columns: Mapping[str, Sequence[float] | np.ndarray] | None = None,
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
    """Trains R models at once, each from its own start, and keeps the best epoch of each.

    Args:
      ratings: the training pairs.
      model: a model with `start`.
      method: one of `METHODS`.
      settings: the settings that all runs share.
      columns: settings that differ between runs, by name, each of length R; no sizes and no names.
      keys: R random keys.
      epochs: how many times every user is visited.
      dev: development data, which select the best epoch.
      test: test data, evaluated once, at every run's best epoch.
      x0: the first parameters of the R runs, with leading axis R; by default `model.start` of each key.
      warm_up: epochs of softmax cross-entropy before the method.
      every: epochs between two measurements.
      watch: the metric that selects the best epoch.
      cutoffs: the k of the test metrics.

    Returns:
      A `Trainings`.

    Raises:
      ValueError: columns and keys have different lengths.
    """
    settings = TrainingSettings() if settings is None else settings
    checked_method(method)
    bx.checks.whole_number("epochs", epochs, 1)
    every = bx.checks.whole_number("every", every, 1)
    varied = {name: jnp.asarray(column, jnp.float32) for name, column in (columns or {}).items()}
    runs = keys.shape[0]
    for name, column in varied.items():
        if column.shape != (runs,):
            raise ValueError(
                f"columns[{name!r}] must have one entry per key, {runs}, got shape {column.shape}"
            )
    _, cutoff = parse_metric(watch)
    for k in (cutoff, *cutoffs):
        bx.checks.whole_number("every cutoff", k, 1, ratings.item_count)
    per_epoch = steps_per_epoch(ratings.users, settings)
    programs = _Programs(model, settings, per_epoch, epochs)

    def measure(x: PyTree, best: _Best, epoch: int) -> _Best:
        return _measure(model, x, dev, best, jnp.asarray(epoch), watch, cutoff)

    began = time.perf_counter()
    x, keys = programs.begin(keys)
    x = x if x0 is None else x0
    if warm_up:
        problem, _ = make_method(WARM_UP, ratings, model, settings, 1)
        states = programs.start(WARM_UP, problem, varied, x, keys)
        states = programs.advance(WARM_UP, problem, varied, states, warm_up * per_epoch)
        x = jax.block_until_ready(states.average)
    problem, _ = make_method(method, ratings, model, settings, epochs * per_epoch)
    states = programs.start(method, problem, varied, x, keys)
    states = programs.advance(method, problem, varied, states, 0)
    jax.block_until_ready(measure(states.average, _nothing_yet(states.average, runs), 0))
    best = _nothing_yet(states.average, runs)
    compile_seconds = time.perf_counter() - began

    at, seconds, curves, running = [], [], [], 0.0
    for epoch in range(every, epochs + every, every):
        epoch = min(epoch, epochs)
        tick = time.perf_counter()
        taken = epoch - (at[-1] if at else 0)
        states = programs.advance(method, problem, varied, states, taken * per_epoch)
        jax.block_until_ready(states.x)
        running += time.perf_counter() - tick
        best = measure(states.average, best, epoch)
        at.append(epoch)
        seconds.append(running)
        curves.append(np.asarray(best.last))
    found = {}
    if test is not None:
        found = jax.device_get(_judge(model, best.x, test, tuple(cutoffs)))
    return Trainings(
        method,
        {name: np.asarray(column) for name, column in varied.items()},
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


# Not parts of `_Programs`: trainings of one model by several methods share what is compiled.
@eqx.filter_jit
def _measure(model: Any, x: PyTree, held: Held, best: _Best, epoch: Array, watch: str, cutoff: int) -> _Best:
    def one(x: PyTree, best: _Best) -> _Best:
        value = jnp.nanmean(evaluate(model, x, held, (cutoff,))[watch])
        better = value > best.value
        kept = jax.tree.map(lambda new, old: jnp.where(better, new, old), x, best.x)
        return _Best(kept, jnp.where(better, value, best.value), jnp.where(better, epoch, best.epoch), value)

    return jax.vmap(one)(x, best)


@eqx.filter_jit
def _judge(model: Any, x: PyTree, held: Held, cutoffs: tuple[int, ...]) -> dict[str, Array]:
    return jax.vmap(lambda x: evaluate(model, x, held, cutoffs))(x)


class _Programs:
    """The compiled steps of one method. The problem and its data are arguments of each, not compiled in."""

    def __init__(self, model: Any, settings: TrainingSettings, per_epoch: int, epochs: int) -> None:
        steps = per_epoch * epochs

        def of_run(method: str, problem: bx.Problem, varied: dict[str, Array]) -> tuple[bx.Problem, Any]:
            own = settings.replace(**varied)
            return with_settings(problem, own), make_solver(method, problem.count, own, steps)

        def begin(key: Array) -> tuple[PyTree, Array]:
            first, rest = jax.random.split(key)
            return model.start(first), rest

        def start(
            method: str, problem: bx.Problem, varied: dict[str, Array], x: PyTree, key: Array
        ) -> bx.State:
            problem, solver = of_run(method, problem, varied)
            levels, go = jax.random.split(key)
            y0 = first_levels(method, problem, model, x, levels, settings.negatives)
            return solver.init(problem, x, y0, key=go, sampling=settings.sampling(problem.count))

        def go_on(
            method: str, problem: bx.Problem, varied: dict[str, Array], state: bx.State, steps: Array
        ) -> bx.State:
            problem, solver = of_run(method, problem, varied)
            return bx.advance(problem, solver, state, steps)

        self.begin = jax.jit(jax.vmap(begin))
        self.start = eqx.filter_jit(_over_runs(start, (None, 0, 0, 0)))
        self._advance = eqx.filter_jit(_over_runs(go_on, (None, 0, 0, None)))

    def advance(
        self, method: str, problem: bx.Problem, varied: Any, states: bx.State, steps: int
    ) -> bx.State:
        """Takes a number of steps in every run."""
        return self._advance(method, problem, varied, states, jnp.asarray(steps))


def _over_runs(function: Any, axes: tuple[Any, ...]) -> Any:
    def mapped(method: str, *arguments: Any) -> Any:
        return jax.vmap(lambda *arguments: function(method, *arguments), in_axes=axes)(*arguments)

    return mapped
