r"""Weights of noisy rows, learnt by cross-validation over the clean rows: a multi-block bilevel problem.

Block (k, ρ) is a classifier with ridge ρ. It is fitted to the weighted noisy rows and to the clean rows
outside fold k, and evaluated on fold k:

.. math::
    \min_x &\; \frac1m \sum_{k, \rho} \frac{1}{|V_k|} \sum_{j \in V_k} \ell(y_{k\rho}(x), j)
        + \text{prior}(x) \\
    y_{k\rho}(x) &= \arg\min_y \sum_{j \text{ noisy}} w_j(x)\, \ell(y, j)
        + \sum_{j \in V \setminus V_k} \ell(y, j) + \frac{\rho}{2} \|y\|^2

So F is the cross-validated loss of the model that is fitted in the end, and x are its hyper-parameters. A
row's weight has a part of its own and a part that it shares with other rows, because few clean rows say
little about a single row:

.. math:: w_j(x) = \sigma(a_j + \text{offset}_{c_j} + \text{slope} \cdot (a_j - \bar a) + \text{row}_j)

where a_j is the logit of a guess (see `noise_model`) and c_j the row's label. A guess that was made with some
clean rows contains information about their labels. To keep F honest, the blocks of fold k start from a guess
that was made without that fold.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from scipy.special import expit

import bilevax as bx
from bilevax.applications import interrupted
from bilevax.applications.fold_rows import HeldOut, NoisyAndClean, bucket, padded
from bilevax.applications.linear import Linear
from bilevax.applications.noisy_task import NoisyTask
from bilevax.applications.reweighting import as_rows, cross_entropy, products

PyTree = Any

SHIFT_DEVIATION = 1.0  # the prior standard deviation of the shift of noisy rows' logits; see `linear.fit`
_DEVIATION = 1.0  # the prior standard deviation of offsets and slope
_ROW_STEP = 0.05  # the step of the rows' own parts, in units where their prior has curvature 1
_LOOSE = 1e-6  # the ridge of intercepts
_LEAST_NOISY, _LEAST_CLEAN, _LEAST_FEATURES = (
    1024,
    128,
    16,
)  # smaller data are padded to these sizes, so that they share one compilation


@dataclasses.dataclass(frozen=True)
class BilevelSettings:
    """Settings of the bilevel run.

    Attributes:
      steps: the most steps to take.
      batch_size: noisy rows, and clean rows, per block and step.
      learning_rate: of offsets and slope (Adam).
      row_deviation: the prior standard deviation of the rows' own parts (logits).
      patience: stop after this many measurements without a better cross-validated loss.
      every: steps between two measurements.
      progress: as in `bilevax.minimize`.
      seed: of the run.
    """

    steps: int = 3000
    batch_size: int = 64
    learning_rate: float = 0.005
    row_deviation: float = 0.5
    patience: int = 8
    every: int = 100
    progress: Any = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Learnt:
    """The result of the bilevel run.

    Attributes:
      weights: of the noisy rows, in (0, 1); one row for each guess.
      history: the measurements of the run, with the cross-validated loss.
      steps: the number of steps taken.
      outcome: why the run ended.
    """

    weights: np.ndarray
    history: bx.History
    steps: int
    outcome: bx.Outcome


def learn_weights(
    task: NoisyTask,
    guess: np.ndarray,
    models: dict[tuple[int, float], Linear],
    settings: BilevelSettings,
) -> Learnt:
    """Learns the weights of noisy rows.

    Args:
      task: the data.
      guess: (folds + 1, n), guessed weights, in (0, 1): without each fold, and with all clean rows.
      models: by fold and ridge, the model fitted with the guessed weights: the start of that block.
      settings: of the run.

    Returns:
      The weights with the least cross-validated loss of the run.
    """
    problem = make_problem(task, guess, list(models), settings.row_deviation)
    size = bucket(guess.shape[1], _LEAST_NOISY)
    x0 = {"offset": jnp.zeros(task.classes), "slope": jnp.zeros(()), "row": jnp.zeros(size)}
    y0 = _stacked(list(models.values()), _width(task.rows))
    try:
        result = bx.minimize(
            problem,
            x0,
            y0,
            solver=bx.BSVRBv2(
                upper_step=_upper_step(settings.learning_rate),
                lower_step=_lower_step(task.rows, task.classes),
            ),
            steps=settings.steps,
            key=jax.random.key(settings.seed),
            batch_size=settings.batch_size,
            metrics={"cross-validated loss": lambda problem, state: cross_validated_loss(problem, state.y)},
            every=min(settings.every, settings.steps),
            progress=settings.progress,
            # The best iterate of a run that diverges or is interrupted is as good as any other.
            stop=bx.Stop(
                patience=settings.patience, watch="cross-validated loss", throw=False, raise_on_interrupt=True
            ),
        )
    except KeyboardInterrupt as interrupt:
        result = interrupted.result_of(interrupt)
    x = x0 if result.best is None else result.best.x
    own = float(problem.blocks["row_scale"][0]) * np.asarray(x["row"])[: guess.shape[1]]
    start = _logit(guess)
    shared = np.asarray(x["offset"])[task.codes] + float(x["slope"]) * (start - start.mean(1, keepdims=True))
    return Learnt(expit(start + shared + own), result.history, int(result.state.step), result.outcome)


def make_problem(
    task: NoisyTask, guess: np.ndarray, blocks: list[tuple[int, float]], row_deviation: float
) -> bx.Problem:
    """The bilevel problem of this module.

    Args:
      task: the data.
      guess: as in `learn_weights`.
      blocks: the fold and the ridge of every block.
      row_deviation: as in `BilevelSettings`.
    """
    order = np.argsort(task.fold, kind="stable")
    offsets = np.searchsorted(task.fold[order], np.arange(task.folds + 1)).astype(np.int32)
    n, k = guess.shape[1], len(task.fold)
    start = _logit(guess[: task.folds]).T
    noisy_rows = {
        "row": as_rows(task.rows, intercept=False),
        "label": task.codes.astype(np.int32),
        "start": start.astype(np.float32),
        "centred": (start - start.mean(0)).astype(np.float32),
        "index": np.arange(n, dtype=np.int32),
    }
    clean_rows = {
        "row": as_rows(task.clean_rows[order], intercept=False, like=task.rows),
        "label": task.clean_codes[order].astype(np.int32),
    }
    for rows in (noisy_rows, clean_rows):
        if "dense" in rows["row"]:
            more = _width(task.rows) - task.rows.shape[1]
            rows["row"] = {"dense": np.pad(rows["row"]["dense"], ((0, 0), (0, more)))}
    noisy_rows, clean_rows = (
        padded(noisy_rows, bucket(n, _LEAST_NOISY)),
        padded(clean_rows, bucket(k, _LEAST_CLEAN)),
    )
    of_block = np.array([one for one, _ in blocks], np.int32)
    inside = np.diff(offsets)[of_block]

    def constant(value: Any) -> np.ndarray:
        return np.broadcast_to(np.float32(value), (len(blocks),)).copy()

    constants = {
        "fold": of_block,
        "noisy_share": constant(n / (n + k)),
        "clean_share": constant((k - inside) / (n + k)),
        "ridge": constant(np.array([ridge for _, ridge in blocks]) / (n + k)),
        "shift_ridge": constant(SHIFT_DEVIATION**-2.0 / (n + k)),
        "prior": constant(_DEVIATION**-2.0 / k),
        "row_scale": constant(row_deviation * k**0.5),
    }
    fold_of, bounds = jnp.asarray(of_block), jnp.asarray(offsets)
    return bx.Problem(
        upper=_upper,
        lower=_lower,
        blocks=constants,
        upper_data=HeldOut(clean_rows, bounds, fold_of),
        lower_data=NoisyAndClean(noisy_rows, clean_rows, jnp.asarray(n), bounds, fold_of),
    )


def row_weights(x: PyTree, rows: PyTree, block: PyTree) -> Array:
    """w_j(x) of the noisy rows in a batch; the rows' own parts are scaled such that their prior is ½ row²."""
    start, centred = rows["start"][:, block["fold"]], rows["centred"][:, block["fold"]]
    own = block["row_scale"] * x["row"][rows["index"]]
    return jax.nn.sigmoid(start + x["offset"][rows["label"]] + x["slope"] * centred + own)


@jax.jit
def cross_validated_loss(problem: bx.Problem, y: PyTree) -> Array:
    """The mean over blocks of the loss on all clean rows of their folds."""
    source: Any = problem.upper_data
    rows, labels = source.clean["row"], source.clean["label"]
    place = jnp.arange(labels.shape[0])

    def of_block(y: PyTree, fold: Array) -> Array:
        first, after = source.offsets[fold], source.offsets[fold + 1]
        inside = (place >= first) & (place < after)
        return jnp.sum(inside * cross_entropy(_logits(y, rows), labels)) / (after - first)

    return jnp.mean(jax.vmap(of_block)(y, source.fold))


def _logits(y: PyTree, rows: PyTree) -> Array:
    z = products(rows, y["coef"]) + y["intercept"]
    return z[..., 0] if z.shape[-1] == 1 else z


def _upper(x: PyTree, y: PyTree, block: PyTree, batch: PyTree) -> Array:
    shared = jnp.sum(x["offset"] ** 2) + x["slope"] ** 2
    prior = 0.5 * (block["prior"] * shared + jnp.sum(x["row"] ** 2))
    return jnp.mean(cross_entropy(_logits(y, batch["row"]), batch["label"])) + prior


def _lower(x: PyTree, y: PyTree, block: PyTree, batch: PyTree) -> Array:
    noisy, clean = batch["noisy"], batch["clean"]
    shifted = {"coef": y["coef"], "intercept": y["intercept"] + y["shift"]}
    weight = row_weights(x, noisy, block)
    loss = block["noisy_share"] * jnp.mean(
        weight * cross_entropy(_logits(shifted, noisy["row"]), noisy["label"])
    )
    loss += block["clean_share"] * jnp.mean(cross_entropy(_logits(y, clean["row"]), clean["label"]))
    ridges = block["ridge"] * jnp.sum(y["coef"] ** 2) + block["shift_ridge"] * jnp.sum(y["shift"] ** 2)
    return loss + 0.5 * (ridges + _LOOSE * jnp.sum(y["intercept"] ** 2))


@functools.lru_cache  # one object per learning rate: JAX compiles anew for every other object
def _upper_step(learning_rate: float) -> optax.GradientTransformation:
    kinds = {"offset": "shared", "slope": "shared", "row": "own"}
    return optax.multi_transform({"shared": optax.adam(learning_rate), "own": optax.sgd(_ROW_STEP)}, kinds)


def _lower_step(rows: Any, classes: int) -> float:
    """2/(3 L_g), from the largest eigenvalue of the rows' second moments and two constant columns."""
    vector = np.random.default_rng(0).normal(size=rows.shape[1]).astype(np.float32)
    largest = 0.0
    for _ in range(10):
        vector = rows.T @ (rows @ (vector / max(float(np.linalg.norm(vector)), 1e-30))) / rows.shape[0]
        largest = float(np.linalg.norm(vector))
    return 2 / (3 * (0.25 if classes == 2 else 0.5) * (largest + 2.0))


def _stacked(models: list[Linear], features: int) -> PyTree:
    coef = np.stack([model.coef for model in models])
    coef = np.pad(coef, ((0, 0), (0, features - coef.shape[1]), (0, 0)))
    y = {
        "coef": coef,
        "intercept": np.stack([model.intercept for model in models]),
        "shift": np.stack([model.shift for model in models]),
    }
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), y)


def _width(rows: Any) -> int:
    """The number of features to which rows are padded."""
    return bucket(rows.shape[1], _LEAST_FEATURES) if rows.shape[1] <= 64 else rows.shape[1]


def _logit(chance: np.ndarray) -> np.ndarray:
    return np.log(chance) - np.log1p(-chance)
