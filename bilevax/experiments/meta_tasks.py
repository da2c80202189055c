"""Few-shot tasks, and the networks that solve them: sine waves, and digits with names of their own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax.data import DataError

Params = list[dict[str, Array]]
_WAYS, _PER_CLASS = 5, 5


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Rows to adapt to and rows to be judged by, each (inputs, targets) with leading axes (tasks, rows)."""

    support: tuple[np.ndarray, np.ndarray]
    query: tuple[np.ndarray, np.ndarray]

    def __len__(self) -> int:
        return len(self.support[0])


@dataclasses.dataclass(frozen=True)
class Family:
    """Tasks of one kind.

    Attributes:
      name: of the kind.
      widths: of the network's layers, inputs and outputs included.
      loss: of (predictions, targets), one value per row.
      squares: of (predictions, targets), the squared error that a ridge regression fits, per row.
      draw: makes (number, seed, part) tasks; the parts "train", "validation" and "test" share no rows.
      error: what is reported besides the loss, of (predictions, targets) per row; None if nothing.
    """

    name: str
    widths: tuple[int, ...]
    loss: Callable[[Array, Array], Array]
    squares: Callable[[Array, Array], Array]
    draw: Callable[[int, int, str], Tasks]
    error: Callable[[Array, Array], Array] | None = None

    def start(self, key: Array) -> Params:
        """A network with random weights."""
        layers: Params = []
        shapes = list(zip(self.widths, self.widths[1:], strict=False))
        for one, (inputs, outputs) in zip(jax.random.split(key, len(shapes)), shapes, strict=True):
            reach, (of_w, of_b) = inputs**-0.5, jax.random.split(one)
            layers.append(
                {
                    "w": jax.random.uniform(of_w, (inputs, outputs), minval=-reach, maxval=reach),
                    "b": jax.random.uniform(of_b, (outputs,), minval=-reach, maxval=reach),
                }
            )
        return layers

    def mean_loss(self, params: Params, rows: tuple[Array, Array]) -> Array:
        """The mean loss of a network over rows."""
        return jnp.mean(self.loss(predict(params, rows[0]), rows[1]))


def predict(params: Params, inputs: Array) -> Array:
    """The outputs of a network with rectified layers."""
    for layer in params[:-1]:
        inputs = jax.nn.relu(inputs @ layer["w"] + layer["b"])
    return inputs @ params[-1]["w"] + params[-1]["b"]


def sines(rows: int = 10) -> Family:
    """y = A sin(t + φ) with A in [0.1, 5] and φ in [0, π], at t in [−5, 5]."""

    def draw(count: int, seed: int, part: str) -> Tasks:
        random = np.random.default_rng([seed, ("train", "validation", "test").index(part)])
        size, phase = random.uniform(0.1, 5, (count, 1, 1)), random.uniform(0, np.pi, (count, 1, 1))

        def some() -> tuple[np.ndarray, np.ndarray]:
            t = random.uniform(-5, 5, (count, rows, 1))
            return t.astype(np.float32), (size * np.sin(t + phase)).astype(np.float32)

        return Tasks(some(), some())

    def loss(out: Array, y: Array) -> Array:
        return jnp.sum((out - y) ** 2, -1)

    return Family("sines", (1, 40, 40, 1), loss, loss, draw)


def digits() -> Family:
    """Five digits of MNIST in a random order, turned by 0, 90, 180 or 270 degrees: which is which?

    A task has five images of each digit to adapt to and five to be judged by. Training, validation and test
    tasks have images of their own.
    """
    parts = _images()

    def draw(count: int, seed: int, part: str) -> Tasks:
        images, labels = parts[part]
        random = np.random.default_rng([seed, ("train", "validation", "test").index(part)])
        places = [np.flatnonzero(labels == digit) for digit in range(10)]
        shape = (count, _WAYS, 2 * _PER_CLASS)
        inputs = np.empty((*shape, images.shape[1] * images.shape[2]), np.float32)
        for task in range(count):
            turns = int(random.integers(4))
            for way, digit in enumerate(random.permutation(10)[:_WAYS]):
                chosen = random.choice(places[digit], 2 * _PER_CLASS, replace=False)
                inputs[task, way] = np.rot90(images[chosen], turns, (1, 2)).reshape(2 * _PER_CLASS, -1)
        targets = np.broadcast_to(np.arange(_WAYS)[None, :, None], shape).astype(np.int32)
        halves = [(slice(None), slice(None), slice(k * _PER_CLASS, (k + 1) * _PER_CLASS)) for k in (0, 1)]
        return Tasks(
            *[(inputs[half].reshape(count, -1, inputs.shape[-1]), _flat(targets[half])) for half in halves]
        )

    def loss(out: Array, y: Array) -> Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(out), y[..., None], -1)[..., 0]

    def squares(out: Array, y: Array) -> Array:
        return jnp.sum((out - jax.nn.one_hot(y, _WAYS, dtype=out.dtype)) ** 2, -1)

    def error(out: Array, y: Array) -> Array:
        return (jnp.argmax(out, -1) != y).astype(float)

    return Family("digits", (196, 32, 32, _WAYS), loss, squares, draw, error)


def _flat(targets: np.ndarray) -> np.ndarray:
    return targets.reshape(len(targets), -1)


def _images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """MNIST in 14 × 14 pixels between 0 and 1, from `mnist.npz` in the folder BILEVAX_DATA."""
    path = Path(os.environ.get("BILEVAX_DATA", ".")) / "mnist.npz"
    try:
        with np.load(path) as stored:
            arrays: dict[str, Any] = {
                name: stored[name] for name in ("x_train", "y_train", "x_test", "y_test")
            }
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} must hold MNIST as x_train, y_train, x_test and y_test: {error}") from error

    def small(images: np.ndarray) -> np.ndarray:
        return images.reshape(-1, 14, 2, 14, 2).mean((2, 4)).astype(np.float32) / 255

    known, held = slice(None, 50_000), slice(50_000, None)
    return {
        "train": (small(arrays["x_train"][known]), arrays["y_train"][known]),
        "validation": (small(arrays["x_train"][held]), arrays["y_train"][held]),
        "test": (small(arrays["x_test"]), arrays["y_test"]),
    }
