"""The problems of `benchmarks.single_block`: one block each, with an exact value function."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import expit, log_softmax, softmax
from sklearn.datasets import load_svmlight_file

import bilevax as bx

WIDTHS = {"a8a": 123, "w8a": 300}
# Upper steps, plain and of Adam, and lower steps: wide enough that no method is best at an edge for its lack.
GRIDS = {
    "a8a": ((30.0, 60.0, 120.0, 240.0), (0.00025, 0.0005, 0.001, 0.002), (0.1, 0.2, 0.4, 0.8)),
    "w8a": ((1000.0, 3000.0, 1e4, 3e4), (0.001, 0.003, 0.01), (0.2, 0.4, 1.0, 2.0)),
    "mnist": ((3e3, 1e4, 3e4, 1e5), (0.03, 0.1, 0.3, 1.0), (0.05, 0.1, 0.2)),
}
ROWS, CLEAN, RIDGE = 20_000, 5_000, 0.01  # of the data cleaning problem


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A problem with one block.

    Attributes:
      problem: the problem.
      x0, y0: the start.
      value: h(x) = f(x, y(x)), from x and a start for solving for y(x).
      least: min h as L-BFGS finds it from a start, within a number of evaluations and of seconds.
      starts: some of them.
      box: bounds on x_j, from the lower step.
      upper_steps, adam_steps, lower_steps: the grid of the search.
      upper_sees_x: whether f reads x; it does not in these problems.
    """

    problem: bx.Problem
    x0: Any
    y0: Any
    value: Callable[[Any, Any], float]
    least: Callable[[Any, int, float], float]
    starts: list[Any]
    box: Callable[[float], tuple[float, float]]
    upper_steps: tuple[float, ...]
    adam_steps: tuple[float, ...]
    lower_steps: tuple[float, ...]
    upper_sees_x: bool = False


def lowest(both: Any, start: Any, evaluations: int, seconds: float, bounds: Any = None) -> float:
    """The least value that L-BFGS finds from a start, given the value with its gradient."""
    began, least = time.monotonic(), [np.inf]

    def watched(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = both(x)
        least[0] = min(least[0], value)
        return value, slope

    def late(intermediate_result: Any) -> None:
        if time.monotonic() - began > seconds:
            raise StopIteration

    minimize(
        watched, np.asarray(start, float), jac=True, method="L-BFGS-B", bounds=bounds, callback=late,
        options={"maxfun": evaluations, "maxiter": evaluations, "maxcor": 30, "gtol": 1e-8, "ftol": 0},
    )  # fmt: skip
    return float(least[0])


# --- a strength of regularisation per feature ------------------------------------


def _upper(x, y, block, batch):
    return jnp.mean(jax.nn.softplus(-batch["label"] * (batch["row"] @ y)))


def _lower(x, y, block, batch):
    loss = jax.nn.softplus(-batch["label"] * (batch["row"] @ y))
    return jnp.mean(loss) + 0.5 * jnp.sum(jnp.exp(x) * y * y)


class Regularised:
    """h and its gradient in float64, by Newton's method with sparse rows."""

    def __init__(self, rows: Any, labels: np.ndarray, held: Any, held_labels: np.ndarray):
        self.signed: Any = sp.csr_matrix(sp.diags(labels) @ rows)
        self.held: Any = sp.csr_matrix(sp.diags(held_labels) @ held)
        self.last = np.zeros(rows.shape[1])

    def solve(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """y(x), and the Hessian at it."""
        count, strength = self.signed.shape[0], np.exp(np.asarray(x, float))
        for _ in range(100):
            p = expit(-(self.signed @ y))
            slope = -(self.signed.T @ p) / count + strength * y
            hessian = (self.signed.T @ self.signed.multiply((p * (1 - p))[:, None])).toarray() / count
            hessian += np.diag(strength)
            if np.linalg.norm(slope) < 1e-9:
                break
            step = np.linalg.solve(hessian, slope)
            size, now = 1.0, self._loss(strength, y)
            while self._loss(strength, y - size * step) > now and size > 1e-6:
                size /= 2
            y = y - size * step
        return y, hessian

    def _loss(self, strength: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean(np.logaddexp(0, -(self.signed @ y))) + 0.5 * strength @ y**2)

    def value(self, x: Any, y: Any) -> float:
        y, _ = self.solve(np.asarray(x, float), np.asarray(y, float).reshape(-1))
        return float(np.mean(np.logaddexp(0, -(self.held @ y))))

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        y, hessian = self.solve(x, self.last)
        self.last = y
        scores = self.held @ y
        v = np.linalg.solve(hessian, -(self.held.T @ expit(-scores)) / len(scores))
        return float(np.mean(np.logaddexp(0, -scores))), -np.exp(x) * y * v

    def least(self, start: Any, evaluations: int, seconds: float) -> float:
        """Min h."""
        bounds = [(-25, 25)] * self.signed.shape[1]
        return lowest(self.value_and_gradient, start, evaluations, seconds, bounds)


def _box(lower_step: float) -> tuple[float, float]:
    """Strengths from exp(−12), practically zero, to 0.3/τ, so that the lower step τ is stable."""
    return -12.0, float(np.log(0.3 / lower_step))


def regularised(name: str, folder: Path) -> Case:
    """a8a or w8a."""
    width = WIDTHS[name]
    parts = [load_svmlight_file(str(folder / "libsvm" / f), n_features=width) for f in (name, f"{name}.t")]
    data = [
        bx.Shared({"row": rows.toarray().astype(np.float32), "label": labels.astype(np.float32)})
        for rows, labels in parts
    ]
    exact = Regularised(*parts[0], *parts[1])
    problem = bx.Problem(_upper, _lower, 1, upper_data=data[1], lower_data=data[0])
    start = jnp.zeros(width), jnp.zeros((1, width))
    starts = [np.full(width, level) for level in (0.0, -6.0, -1.0)]  # middling, weak and strong
    return Case(problem, *start, exact.value, exact.least, starts, _box, *GRIDS[name])


# --- a weight per training row -----------------------------------------------------


def _entropy(y, batch):
    logits = batch["row"] @ y
    chosen = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - chosen


def _clean_upper(x, y, block, batch):
    return jnp.mean(_entropy(y, batch))


def _weighted_lower(x, y, block, batch):
    weight = jax.nn.sigmoid(x[batch["index"]])
    return jnp.mean(weight * _entropy(y, batch)) + 0.5 * RIDGE * jnp.sum(y * y)


class Weighted:
    """h, with y(x) by L-BFGS, in coordinates in which the Hessian is near the identity.

    With weights of ½ and even chances of 10 classes it would be 0.045 rowsᵀ rows / n + 0.01.
    """

    def __init__(self, rows: np.ndarray, labels: np.ndarray, held: np.ndarray, held_labels: np.ndarray):
        self.rows, self.held, self.held_labels = rows, held, held_labels
        self.one_hot = np.eye(10, dtype=np.float32)[labels]
        self.labels, self.last = labels, np.zeros((rows.shape[1], 10))
        squares, directions = np.linalg.eigh((rows.T @ rows).astype(float) / len(rows))
        self.curvature, self.directions = np.sqrt(0.045 * np.maximum(squares, 0) + RIDGE), directions

    def value(self, x: Any, y: Any) -> float:
        logits = self.held @ self.solve(x, y, 3e-6)
        return float(-log_softmax(logits, 1)[np.arange(len(logits)), self.held_labels].mean())

    def solve(self, x: Any, y: Any, tolerance: float) -> np.ndarray:
        """y(x)."""
        weight = expit(np.asarray(x, float)) / len(self.rows)
        scaled = self.directions / self.curvature

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            y = scaled @ flat.reshape(-1, 10)
            logits = (self.rows @ y.astype(np.float32)).astype(float)
            loss = -log_softmax(logits, 1)[np.arange(len(logits)), self.labels]
            slope = weight[:, None] * (softmax(logits, 1) - self.one_hot)
            gradient = (self.rows.T @ slope.astype(np.float32)).astype(float) + RIDGE * y
            return float(weight @ loss + 0.5 * RIDGE * np.sum(y * y)), (scaled.T @ gradient).ravel()

        start = self.curvature[:, None] * (self.directions.T @ np.asarray(y, float).reshape(-1, 10))
        found = minimize(
            objective, start.ravel(), jac=True, method="L-BFGS-B",
            options={"maxiter": 300, "maxcor": 20, "gtol": tolerance, "ftol": 1e-13},
        )  # fmt: skip
        return scaled @ found.x.reshape(-1, 10)

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """h and its gradient; v by conjugate gradients."""
        self.last = y = self.solve(x, self.last, 1e-6)
        weight, p = expit(x) / len(self.rows), softmax(self.rows @ y.astype(np.float32), 1)
        logits = self.held @ y
        right = self.held.T @ (softmax(logits, 1) - np.eye(10)[self.held_labels]) / len(logits)

        def curved(flat: np.ndarray) -> np.ndarray:
            v = flat.reshape(-1, 10)
            turned = self.rows @ v.astype(np.float32)
            slope = weight[:, None] * p * (turned - np.sum(p * turned, 1, keepdims=True))
            return ((self.rows.T @ slope.astype(np.float32)).astype(float) + RIDGE * v).ravel()

        operator: Any = LinearOperator((y.size, y.size), matvec=curved)  # pyright: ignore[reportCallIssue]
        v = cg(operator, right.ravel(), rtol=1e-6, maxiter=200)[0].reshape(-1, 10)
        through = np.sum((p - self.one_hot) * (self.rows @ v.astype(np.float32)), 1)
        value = float(-log_softmax(logits, 1)[np.arange(len(logits)), self.held_labels].mean())
        return value, -weight * (1 - expit(x)) * through

    def least(self, start: Any, evaluations: int, seconds: float) -> float:
        """Min h."""
        return lowest(self.value_and_gradient, start, evaluations, seconds)


def cleaning(folder: Path) -> Case:
    """MNIST with half of the training labels wrong."""
    with np.load(folder / "mnist.npz") as files:
        images, digits = files["x_train"], files["y_train"].astype(np.int32)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits))[: ROWS + CLEAN]
    rows = images[order].reshape(len(order), -1).astype(np.float32) / 255
    right = digits[order]
    labels, held_labels = right[:ROWS].copy(), right[ROWS:]
    wrong = rng.permutation(ROWS)[: ROWS // 2]
    labels[wrong] = (labels[wrong] + rng.integers(1, 10, len(wrong))) % 10
    exact = Weighted(rows[:ROWS], labels, rows[ROWS:], held_labels)
    problem = bx.Problem(
        _clean_upper, _weighted_lower, 1,
        upper_data=bx.Shared({"row": rows[ROWS:], "label": held_labels}),
        lower_data=bx.Shared(
            {"row": rows[:ROWS], "label": labels, "index": np.arange(ROWS, dtype=np.int32)}
        ),
    )  # fmt: skip
    return Case(
        problem,
        jnp.zeros(ROWS),
        jnp.zeros((1, rows.shape[1], 10)),
        exact.value,
        exact.least,
        [np.zeros(ROWS)],
        lambda _: (-np.inf, np.inf),
        *GRIDS["mnist"],
    )


CASES: dict[str, Callable[[Path], Case]] = {
    "a8a": functools.partial(regularised, "a8a"),
    "w8a": functools.partial(regularised, "w8a"),
    "mnist": cleaning,
}
