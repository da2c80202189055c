"""One training loop for all methods: an optional warm-up, then the method, watched on development data."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.problem import Problem
from bilevax._run.history import History
from bilevax._run.minimize import minimize
from bilevax._run.outcome import Outcome
from bilevax._run.progress import Choice, Progress
from bilevax._step.state import State
from bilevax._util import checks
from bilevax.applications.ranking.evaluation import METRICS, Held, mean_metrics
from bilevax.applications.ranking.methods import (
    BILEVEL,
    Settings,
    checked_method,
    make_method,
    steps_per_epoch,
)
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.start import start_levels

PyTree = Any

WARM_UP = "softmax"
_LEAST_SECONDS = 1e-3


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `train` returns.

    Attributes:
      x: the parameters: the best by the watched metric where that is watched, else the last.
      epoch: the epoch they are from; 0 if the run was cut in its warm-up.
      history: what was measured; "missed ndcg@10" is 1 − NDCG@10. That of the warm-up, which has no such
        metric, if the run was cut there.
      outcome: why the run ended.
      seconds_per_epoch: of the compiled steps; NaN if there were none.
    """

    x: PyTree
    epoch: float
    history: History
    outcome: Outcome
    seconds_per_epoch: float


def train(
    ratings: Ratings,
    model: Any,
    method: str = "k-song",
    settings: Settings | None = None,
    *,
    key: Array,
    epochs: int = 200,
    warm_up: int = 0,
    warm_settings: Settings | None = None,
    x0: PyTree = None,
    dev: Held | None = None,
    watch: str = "ndcg@10",
    every: int = 5,
    patience: int | None = None,
    progress: Choice | Progress | None = "auto",
    seconds: float | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
) -> Trained:
    """Trains a model by a method.

    Args:
      ratings: the training pairs.
      model: `NeuMF`, `MF` or any object with `score(x, user, items)`.
      method: one of `METHODS`.
      settings: the method's numbers.
      key: the random key: the same key gives the same run.
      epochs: how often every user is visited.
      warm_up: epochs of softmax cross-entropy before that.
      warm_settings: its numbers; left out, the method's.
      x0: where the parameters start; left out, `model.start(key)`.
      dev: held-out pairs to be measured on, made by `hold_out`.
      watch: the metric by which the best epoch is kept; needs `dev`.
      every: epochs between two measurements.
      patience: stop when the watched metric has not improved for so many measurements.
      progress: as in `bx.minimize`.
      seconds: stop after about so much time, the warm-up included.
      checkpoint: a directory for checkpoints; the warm-up has its own in it.
      resume: go on from the latest checkpoint.

    Returns:
      A `Trained`.

    Raises:
      ValueError: if an argument is out of range, or a metric is watched without `dev`.
    """
    settings = Settings() if settings is None else settings
    checked_method(method)
    checks.whole_number("epochs", epochs, 1)
    checks.whole_number("warm_up", warm_up, 0)
    checks.whole_number("every", every, 1)
    if patience is not None and dev is None:
        raise ValueError("patience needs dev, the held-out pairs to be measured on, got dev=None")
    name, cutoff = parse_metric(watch)
    if dev is not None and cutoff > dev.item_count:
        raise ValueError(f"watch must have a cutoff of at most {dev.item_count} items, got {watch!r}")
    start, warm, rest = jax.random.split(key, 3)
    if x0 is None:
        x0 = started(model, start)
    keep = {"progress": progress, "resume": resume}
    folder = None if checkpoint is None else Path(checkpoint)
    if warm_up:
        began = time.perf_counter()
        first, _ = _run(
            ratings, model, WARM_UP, warm_settings or settings, x0, warm, warm_up, None,
            seconds=seconds, checkpoint=None if folder is None else folder / "warm-up", **keep,
        )  # fmt: skip
        if seconds is not None:
            seconds = max(seconds - (time.perf_counter() - began), _LEAST_SECONDS)
        if first.outcome in (Outcome.INTERRUPTED, Outcome.TIME):
            return Trained(first.x, 0.0, first.history, first.outcome, float("nan"))
        x0 = first.x
    measure = None if dev is None else Missed(model, dev, name, cutoff)
    result, per_epoch = _run(
        ratings, model, method, settings, x0, rest, epochs, measure,
        every=every, patience=patience, seconds=seconds,
        checkpoint=None if folder is None else folder / "method", **keep,
    )  # fmt: skip
    best = result.best
    x, step = (result.x, int(result.state.step)) if best is None else (best.x, best.step)
    speed = result.steps_per_second
    seconds_per_epoch = per_epoch / speed if speed else float("nan")
    return Trained(x, step / per_epoch, result.history, result.outcome, seconds_per_epoch)


def _run(
    ratings: Ratings,
    model: Any,
    method: str,
    settings: Settings,
    x0: PyTree,
    key: Array,
    epochs: int,
    measure: Missed | None,
    every: int | None = None,
    patience: int | None = None,
    **options: Any,
) -> tuple[Any, int]:
    per_epoch = steps_per_epoch(ratings.users, settings)
    problem, solver = make_method(method, ratings, model, settings, epochs * per_epoch)
    begin, go = jax.random.split(key)
    y0 = first_levels(method, problem, model, x0, begin, settings)
    watched: dict[str, Any] = {}
    if measure is not None:
        # Without patience the best epoch is kept all the same: no run has so many measurements.
        endless = np.iinfo(np.int32).max
        watched = {
            "metrics": {measure.name: measure},
            "watch": measure.name,
            "patience": endless if patience is None else patience,
        }
    result = minimize(
        problem,
        solver,
        x0,
        y0,
        steps=epochs * per_epoch,
        key=go,
        blocks_per_step=min(settings.users_per_step, ratings.users),
        batch_size=settings.negatives,
        initial_batch_size=0,
        every=None if every is None else every * per_epoch,
        **watched,
        **options,
    )
    return result, per_epoch


class Missed:
    """1 − a metric of development data, for a loop that keeps what is least."""

    def __init__(self, model: Any, held: Held, metric: str, cutoff: int):
        self.model, self.held, self.metric, self.cutoff = model, held, f"{metric}@{cutoff}", cutoff

    @property
    def name(self) -> str:
        """What the history calls it."""
        return f"missed {self.metric}"

    def __call__(self, problem: Problem, state: State) -> Array:
        (means,) = mean_metrics(self.model, state.average, (self.held,), (self.cutoff,))
        return 1 - means[self.metric]


def first_levels(
    method: str, problem: Problem, model: Any, x: PyTree, key: Array, settings: Settings
) -> dict[str, Any]:
    """y0 of a method at x."""
    if method not in BILEVEL:
        return {"nothing": None}
    return eqx.filter_jit(start_levels)(problem, model, x, key, settings.negatives)


def started(model: Any, key: Array) -> PyTree:
    """A model's first parameters."""
    if not callable(getattr(model, "start", None)):
        raise TypeError(f"x0 must be given for a model without start(key), got {type(model).__name__}")
    return jax.tree.map(jnp.asarray, model.start(key))


def parse_metric(text: str) -> tuple[str, int]:
    """A metric and its cutoff, from "ndcg@10".

    Raises:
      ValueError: if there is no such metric.
    """
    name, _, cutoff = str(text).partition("@")
    if name not in METRICS or not cutoff.isdigit() or int(cutoff) < 1:
        raise ValueError(f"watch must be one of {list(METRICS)} with a cutoff, as 'ndcg@10', got {text!r}")
    return name, int(cutoff)
