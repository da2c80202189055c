"""The training loop of all methods: an optional warm-up, then the method, measured on development data."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications import interrupted
from bilevax.applications.ranking.array_file import full_path
from bilevax.applications.ranking.epoch_progress import EpochProgress, missed_name
from bilevax.applications.ranking.evaluation import METRICS, mean_metrics
from bilevax.applications.ranking.held_out import Held
from bilevax.applications.ranking.methods import (
    TrainingSettings,
    checked_method,
    make_method,
    steps_per_epoch,
)
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.start import first_levels

PyTree = Any

WARM_UP = "softmax"
_LEAST_SECONDS = 1e-3


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of `train`.

    Attributes:
      x: the parameters: the best by the watched metric if there is one, else the last.
      epoch: the epoch of x; 0 if the run ended during its warm-up.
      history: the measurements; "missed ndcg@10" is 1 − NDCG@10. If the run ended during its warm-up, the
        history of the warm-up, which has no such metric.
      outcome: why the run ended.
      seconds_per_epoch: of the compiled steps; NaN if there were none.
    """

    x: PyTree
    epoch: float
    history: bx.History
    outcome: bx.Outcome
    seconds_per_epoch: float


def train(
    ratings: Ratings,
    model: Any,
    method: str = "k-song",
    settings: TrainingSettings | None = None,
    *,
    key: Array,
    epochs: int = 200,
    warm_up: int = 0,
    warm_settings: TrainingSettings | None = None,
    x0: PyTree = None,
    dev: Held | None = None,
    watch: str = "ndcg@10",
    every: int = 5,
    patience: int | None = None,
    progress: bx.Progress | str | None = "auto",
    seconds: float | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    raise_on_interrupt: bool = False,
) -> Trained:
    """Trains a model by a method.

    Args:
      ratings: the training pairs.
      model: `NeuMF`, `MF` or any object with `score(x, user, items)`.
      method: one of `METHODS`.
      settings: the method's hyper-parameters.
      key: the random key: the same key gives the same run.
      epochs: how many times every user is visited.
      warm_up: epochs of softmax cross-entropy before that.
      warm_settings: hyper-parameters of the warm-up; by default those of the method.
      x0: the first parameters; by default `model.start(key)`.
      dev: held-out pairs for measurements, made by `hold_out`.
      watch: the metric that selects the best epoch; needs `dev`.
      every: epochs between two measurements.
      patience: stop when the watched metric has not improved for this many measurements.
      progress: as in `bx.minimize`. It shows the epoch, the watched metric and its best value so far, and
        the objective of the method with its settings.
      seconds: stop after about this much time, the warm-up included.
      checkpoint: a directory for checkpoints; "~" is the home folder.
      resume: continue from the latest checkpoint.
      raise_on_interrupt: as in `bx.Stop`.

    Returns:
      A `Trained`.

    Raises:
      ValueError: an argument is out of range, or there is `patience` without `dev`.
      KeyboardInterrupt: after a signal, with `raise_on_interrupt`; its `result` is the `Trained`.
    """
    settings = TrainingSettings() if settings is None else settings
    checked_method(method)
    bx.checks.whole_number("epochs", epochs, 1)
    bx.checks.whole_number("warm_up", warm_up, 0)
    bx.checks.whole_number("every", every, 1)
    if patience is not None and dev is None:
        raise ValueError("patience needs dev, the held-out pairs for measurements, got dev=None")
    name, cutoff = parse_metric(watch)
    if dev is not None and cutoff > dev.item_count:
        raise ValueError(f"watch must have a cutoff of at most {dev.item_count} items, got {watch!r}")
    start, warm, rest = jax.random.split(key, 3)
    if x0 is None:
        x0 = started(model, start)
    folder = None if checkpoint is None else full_path(checkpoint)

    def saved(part: str) -> bx.Checkpoint | None:
        return None if folder is None else bx.Checkpoint(folder / part, resume=resume)

    if warm_up:
        began = time.perf_counter()
        first, _ = _run(
            ratings, model, WARM_UP, warm_settings or settings, x0, warm, warm_up, None, seconds=seconds,
            checkpoint=saved("warm-up"), progress=progress, raise_on_interrupt=raise_on_interrupt,
        )  # fmt: skip
        if seconds is not None:
            seconds = max(seconds - (time.perf_counter() - began), _LEAST_SECONDS)
        if first.outcome in (bx.Outcome.INTERRUPTED, bx.Outcome.TIME):
            cut = Trained(first.x, 0.0, first.history, first.outcome, float("nan"))
            return _unless_interrupted(cut, raise_on_interrupt)
        x0 = first.x
    measure = None if dev is None else Missed(model, dev, name, cutoff)
    result, per_epoch = _run(
        ratings, model, method, settings, x0, rest, epochs, measure,
        every=every, patience=patience, seconds=seconds, checkpoint=saved("method"), progress=progress,
        raise_on_interrupt=raise_on_interrupt,
    )  # fmt: skip
    best = result.best
    x, step = (result.x, int(result.state.step)) if best is None else (best.x, best.step)
    speed = result.steps_per_second
    seconds_per_epoch = per_epoch / speed if speed else float("nan")
    trained = Trained(x, step / per_epoch, result.history, result.outcome, seconds_per_epoch)
    return _unless_interrupted(trained, raise_on_interrupt)


def _unless_interrupted(trained: Trained, raises: bool) -> Trained:
    if raises and trained.outcome is bx.Outcome.INTERRUPTED:
        interrupt = KeyboardInterrupt("the training was interrupted: this error's `result` holds its model")
        interrupt.result = trained  # pyright: ignore[reportAttributeAccessIssue]
        raise interrupt
    return trained


def _run(
    ratings: Ratings,
    model: Any,
    method: str,
    settings: TrainingSettings,
    x0: PyTree,
    key: Array,
    epochs: int,
    measure: Missed | None,
    every: int | None = None,
    patience: int | None = None,
    seconds: float | None = None,
    raise_on_interrupt: bool = False,
    progress: bx.Progress | str | None = None,
    **options: Any,
) -> tuple[bx.Result, int]:
    per_epoch = steps_per_epoch(ratings.users, settings)
    problem, solver = make_method(method, ratings, model, settings, epochs * per_epoch)
    begin, go = jax.random.split(key)
    y0 = first_levels(method, problem, model, x0, begin, settings.negatives)
    stop = bx.Stop(seconds=seconds, raise_on_interrupt=raise_on_interrupt)
    if measure is not None:
        # The best epoch is kept without patience too: no run has this many measurements.
        endless = np.iinfo(np.int32).max
        stop = dataclasses.replace(
            stop, patience=endless if patience is None else patience, watch=measure.name
        )
    try:
        result = bx.minimize(
            problem,
            x0,
            y0,
            solver=solver,
            steps=epochs * per_epoch,
            key=go,
            sampling=settings.sampling(ratings.users),
            metrics=None if measure is None else {measure.name: measure},
            every=None if every is None else every * per_epoch,
            stop=stop,
            progress=EpochProgress(
                progress, epochs * per_epoch, per_epoch, None if measure is None else measure.metric
            ),
            **options,
        )
    except KeyboardInterrupt as interrupt:
        result = interrupted.result_of(interrupt)
    return result, per_epoch


class Missed:
    """1 − a metric of development data: `bx.minimize` keeps the iterate with the least value."""

    def __init__(self, model: Any, held: Held, metric: str, cutoff: int):
        self.model, self.held, self.metric, self.cutoff = model, held, f"{metric}@{cutoff}", cutoff

    @property
    def name(self) -> str:
        """Its name in the history."""
        return missed_name(self.metric)

    def __call__(self, problem: bx.Problem, state: bx.State) -> Array:
        (means,) = mean_metrics(self.model, state.average, (self.held,), (self.cutoff,))
        return 1 - means[self.metric]


def started(model: Any, key: Array) -> PyTree:
    """A model's first parameters."""
    if not callable(getattr(model, "start", None)):
        raise TypeError(f"x0 must be given for a model without start(key), got {type(model).__name__}")
    return jax.tree.map(jnp.asarray, model.start(key))


def parse_metric(text: str) -> tuple[str, int]:
    """A metric and its cutoff, from "ndcg@10".

    Raises:
      ValueError: there is no such metric.
    """
    parts = re.fullmatch(r"([a-z]+)@([1-9][0-9]{0,8})", str(text))
    if parts is None or parts[1] not in METRICS:
        raise ValueError(f"watch must be one of {list(METRICS)} with a cutoff, as 'ndcg@10', got {text!r}")
    return parts[1], int(parts[2])
