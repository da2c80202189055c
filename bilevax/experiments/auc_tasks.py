"""Ten imbalanced tasks of MNIST under one network: min-max AUC by bilevel methods, beside cross-entropy.

Task k is digit k against the rest, with few positive images. All networks have the same shape, and all
methods see the same number of images per step. The first three lines are cross-entropy: a network per task,
and one network for all tasks, on balanced batches and on batches as the images come.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from sklearn.metrics import roc_auc_score

import bilevax as bx
from bilevax.applications.auc import TaskRows, centres, multi_task_auc
from bilevax.data import DataError
from bilevax.experiments.report import spread

PyTree = Any
NOTE = (
    "test AUC: mean over tasks, ± standard deviation over seeds; worst: of the ten tasks, mean over seeds; "
    "between tasks: the standard deviation, mean over seeds. Cross-entropy and the lines with Adam take "
    "Adam's steps of 0.001; the others choose their steps themselves."
)
TASKS, HIDDEN = 10, 128
METHODS = (
    "cross-entropy, a network per task",
    "cross-entropy, as images come",
    "cross-entropy, balanced",
    "AUC, MMBO",
    "AUC, MMBO, Adam",
    "AUC, BSVRBv2, Adam",
)


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """The options of the tasks.

    Attributes:
      images: training images.
      positives: positive ones of every task.
      batch: positive images, and negative ones, of every task in a step.
      steps: of every method.
      width: of the shared representation.
      rate: Adam's.
    """

    images: int = 8000
    positives: int = 20
    batch: int = 32
    steps: int = 1000
    width: int = 64
    rate: float = 1e-3

    def quick(self) -> TaskOptions:
        """A short check."""
        return dataclasses.replace(self, images=600, positives=10, batch=4, steps=20, width=8)


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images as rows of numbers from 0 to 1, and their digits."""

    rows: np.ndarray
    digit: np.ndarray
    test_rows: np.ndarray
    test_digit: np.ndarray


def load_digits() -> Digits:
    """MNIST from the file mnist.npz in the folder that BILEVAX_DATA names.

    Raises:
      DataError: there is no such file.
    """
    path = Path(os.environ.get("BILEVAX_DATA", ".")) / "mnist.npz"
    if not path.exists():
        raise DataError("does not exist: BILEVAX_DATA must name the folder of mnist.npz", path=path)
    with np.load(path) as files:
        parts = [
            part
            for name in ("train", "test")
            for part in (files[f"x_{name}"].reshape(-1, 784).astype(np.float32) / 255, files[f"y_{name}"])
        ]
    return Digits(*parts)


def task_labels(digit: np.ndarray, positives: int, random: np.random.Generator) -> np.ndarray:
    """(10, images): 1 for some images of the task's digit, 0 for the others of it, −1 for other digits."""
    labels = np.full((TASKS, len(digit)), -1, np.int8)
    for task in range(TASKS):
        members = random.permutation(np.flatnonzero(digit == task))
        labels[task, members] = 0
        labels[task, members[:positives]] = 1
    return labels


def network(key: Array, inputs: int, width: int) -> dict[str, Array]:
    """A shared network of two layers, and a head per task."""
    keys = jax.random.split(key, 3)
    return {
        "first": jax.random.normal(keys[0], (inputs, HIDDEN)) * (2 / inputs) ** 0.5,
        "first_bias": jnp.zeros(HIDDEN),
        "second": jax.random.normal(keys[1], (HIDDEN, width)) * (2 / HIDDEN) ** 0.5,
        "second_bias": jnp.zeros(width),
        "heads": jax.random.normal(keys[2], (TASKS, width)) / width**0.5,
        "head_bias": jnp.zeros(TASKS),
    }


def features(x: PyTree, rows: Array) -> Array:
    """The shared representation of rows."""
    hidden = jax.nn.relu(rows @ x["first"] + x["first_bias"])
    return jax.nn.relu(hidden @ x["second"] + x["second_bias"])


def logits(x: PyTree, task: Any, rows: Array) -> Array:
    """The logits of rows for a task."""
    return features(x, rows) @ x["heads"][task] + x["head_bias"][task]


def fitted(title: str, options: TaskOptions, seed: int) -> dict[str, Any]:
    """The AUC of every task on the test images, by one method, and its seconds."""
    digits = load_digits()
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(digits.digit))[: options.images]
    labels = task_labels(digits.digit[chosen], options.positives, random)
    method = _methods(digits.rows[chosen], labels, options, seed)[title]
    print(f"tasks, {title}, seed {seed}", flush=True)
    began = time.perf_counter()
    scores = np.asarray(method(digits.test_rows))
    seconds = time.perf_counter() - began
    areas = [float(roc_auc_score(digits.test_digit == task, scores[:, task])) for task in range(TASKS)]
    return {"areas": areas, "seconds": seconds}


def table(found: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A line for every method, from what its seeds came to."""
    rows = []
    for title, fits in found.items():
        areas = np.array([fit["areas"] for fit in fits])  # (seeds, tasks)
        rows.append(
            {
                "method": title,
                "test AUC": spread(areas.mean(1)),
                "worst": f"{areas.min(1).mean():.4f}",
                "between tasks": f"{areas.std(1, ddof=1).mean():.4f}",
                "seconds": f"{np.mean([fit['seconds'] for fit in fits]):.1f}",
            }
        )
    return rows


Method = Callable[[np.ndarray], Array]


def _methods(rows: np.ndarray, labels: np.ndarray, options: TaskOptions, seed: int) -> dict[str, Method]:
    """Every method, as a function that fits a network and returns the scores of test images."""
    x0 = network(jax.random.key(seed), rows.shape[1], options.width)
    adam = optax.adam(options.rate)
    source = TaskRows(rows, labels)

    def all_logits(x: PyTree, images: np.ndarray) -> Array:
        return features(x, jnp.asarray(images)) @ x["heads"].T + x["head_bias"]

    def own(images: np.ndarray) -> Array:
        keys = jax.random.split(jax.random.key(seed), TASKS)
        every = jax.vmap(lambda key: network(key, rows.shape[1], options.width))(keys)

        def loss(every: PyTree, data: PyTree, random: bx.Stream) -> Array:
            batch = data.draw(random, jnp.arange(TASKS), options.batch).rows
            return jnp.sum(jax.vmap(_cross_entropy)(every, jnp.arange(TASKS), batch))

        every = _descend(loss, every, source, adam, options.steps, seed)
        scores = jax.vmap(lambda x, task: logits(x, task, jnp.asarray(images)))
        return scores(every, jnp.arange(TASKS)).T

    def balanced(images: np.ndarray) -> Array:
        def loss(x: PyTree, data: PyTree, random: bx.Stream) -> Array:
            batch = data.draw(random, jnp.arange(TASKS), options.batch).rows
            return jnp.mean(jax.vmap(_cross_entropy, (None, 0, 0))(x, jnp.arange(TASKS), batch))

        return all_logits(_descend(loss, x0, source, adam, options.steps, seed), images)

    def as_they_come(images: np.ndarray) -> Array:
        def loss(x: PyTree, data: PyTree, random: bx.Stream) -> Array:
            all_rows, all_labels = data
            index = random.integers((2 * TASKS * options.batch,), all_rows.shape[0])
            label = all_labels[:, index].T
            values = features(x, all_rows[index]) @ x["heads"].T + x["head_bias"]
            return jnp.sum((label != 0) * jax.nn.softplus(-label * values)) / jnp.sum(label != 0)

        known = jnp.asarray(rows), jnp.asarray(labels, jnp.float32)
        return all_logits(_descend(loss, x0, known, adam, options.steps, seed), images)

    def area(solver: bx.AbstractSolver) -> Method:
        def fit(images: np.ndarray) -> Array:
            problem = multi_task_auc(rows, labels, lambda x, task, one: jax.nn.sigmoid(logits(x, task, one)))
            result = bx.minimize(
                problem,
                x0,
                centres(TASKS),
                solver=solver,
                steps=options.steps,
                batch_size=options.batch,
                key=jax.random.key(seed),
                progress=None,
            )
            return all_logits(result.x, images)

        return fit

    solvers = (bx.MMBO(), bx.MMBO(adam), bx.BSVRBv2(adam))
    return dict(zip(METHODS, (own, as_they_come, balanced, *map(area, solvers)), strict=True))


def _cross_entropy(x: PyTree, task: Any, batch: PyTree) -> Array:
    """Of as many positive as negative rows of a task."""
    positive, negative = (logits(x, task, batch[side]) for side in ("positive", "negative"))
    return jnp.mean(jax.nn.softplus(-positive)) + jnp.mean(jax.nn.softplus(negative))


def _descend(
    loss: Callable[[PyTree, PyTree, bx.Stream], Array],
    x: PyTree,
    data: PyTree,
    optimizer: optax.GradientTransformation,
    steps: int,
    seed: int,
) -> PyTree:
    """x after steps of an optimizer."""

    random = bx.Stream.start(jax.random.key(seed))

    @jax.jit
    def run(x: PyTree, data: PyTree) -> PyTree:
        def step(number: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            x, state = carry
            slope = jax.grad(loss)(x, data, random.at(number))
            updates, state = optimizer.update(slope, state, x)
            return optax.apply_updates(x, updates), state

        return jax.lax.fori_loop(0, steps, step, (x, optimizer.init(x)))[0]

    return run(x, data)
