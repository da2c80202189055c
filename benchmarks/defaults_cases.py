"""Problems of many kinds, for how well a run does with nothing given.

Every case has an exact F: of a family in `bilevax.testing`, or by `bx.value_and_hypergradient` on all blocks
and rows. `scaled` multiplies x, y or F by a factor, which must not change the relative gap.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_svmlight_file

import bilevax as bx
import bilevax.testing
from benchmarks.newcomer_cases import NEWCOMERS
from benchmarks.single_block_cases import WIDTHS, cleaning, regularised
from benchmarks.solved_case import Case, solved

PyTree = Any


def of_family(kind: str, conditioning: float, noise: float) -> Case:
    """A family of `bilevax.testing`, whose truth is computed by NumPy."""
    family = bilevax.testing.FAMILIES[kind](conditioning=conditioning, noise=noise)
    return Case(
        family.problem,
        family.x0,
        family.y0,
        4000,
        10,
        8,
        family.value,
        lambda x: (family.value(x), family.gradient(x)),
    )


def labelled(seed: int, rows: int, width: int, flipped: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of normal features, labels ±1 by a random direction, and which of them were flipped."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, width)).astype(np.float32)
    labels = np.sign(features @ random.normal(size=width)).astype(np.float32)
    wrong = random.random(rows) < flipped
    return features, np.where(wrong, -labels, labels), wrong


def reweighting(n: int = 1000, clean: int = 50, d: int = 20, m: int = 100) -> Case:
    """The quick start: a weight per noisy row, classifiers of many temperatures judged on clean rows."""
    features, noisy, wrong = labelled(0, n + clean, d, 0.4)
    labels = np.where(wrong, -noisy, noisy)

    def loss(y: Any, block: Any, batch: Any) -> jax.Array:
        return jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block["temperature"])

    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.mean(loss(y, block, batch)),
        lower=lambda x, y, block, batch: (
            jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * loss(y, block, batch)) + 0.5e-2 * y @ y
        ),
        blocks={"temperature": jnp.linspace(1.0, 11.0, m, endpoint=False)},
        upper_data=bx.Shared({"row": features[n:], "label": labels[n:]}),
        lower_data=bx.Shared({"row": features[:n], "label": noisy[:n], "index": jnp.arange(n)}),
    )
    return solved(problem, jnp.zeros(n), jnp.zeros((m, d)), 5000, 10, 32)


def folds(count: int = 10) -> Case:
    """The strength of L2 per feature of a logistic regression, by cross-validation on breast cancer."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    features = ((data.data - data.data.mean(0)) / data.data.std(0)).astype(np.float32)
    labels = np.where(data.target == 1, 1.0, -1.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels)) % count

    def rows(member: Callable[[int], np.ndarray]) -> bx.PerBlock:
        parts = [np.flatnonzero(member(fold)) for fold in range(count)]
        index, offsets = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
        return bx.PerBlock({"row": features[index], "label": labels[index]}, offsets)

    def loss(y: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-batch["label"] * (batch["row"] @ y["w"] + y["b"])))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: (
            loss(y, batch) + 0.5 * jnp.exp(x) @ y["w"] ** 2 + 0.5e-3 * y["b"] ** 2
        ),
        blocks=count,
        upper_data=rows(lambda fold: order == fold),
        lower_data=rows(lambda fold: order != fold),
    )
    width = features.shape[1]
    y0 = {"w": jnp.zeros((count, width)), "b": jnp.zeros(count)}
    return solved(problem, jnp.full(width, np.log(1e-2)), y0, 6000, 10, 8)


def panel(m: int = 400, d: int = 8) -> Case:
    """Ridge regressions with 5 to 200 rows each, which share log-strengths and a scaling of the features."""
    random = np.random.default_rng(1)
    scale, common = np.exp(random.normal(size=d)), random.normal(size=d)
    lengths = random.integers(5, 201, m)

    def rows(lengths: np.ndarray, coefficients: np.ndarray) -> bx.PerBlock:
        owner = np.repeat(np.arange(m), lengths)
        features = random.normal(size=(len(owner), d)) * scale
        targets = np.sum(features * coefficients[owner], 1) + random.normal(size=len(owner))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return bx.PerBlock({"row": features.astype(np.float32), "y": targets.astype(np.float32)}, offsets)

    coefficients = (common + 0.5 * random.normal(size=(m, d))) / scale
    held = rows(np.full(m, 20), coefficients)
    fitted = rows(lengths, coefficients)

    def error(x: Any, y: Any, batch: Any) -> jax.Array:
        return jnp.mean(((batch["row"] * jnp.exp(x["scaling"])) @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(x, y, batch),
        lower=lambda x, y, block, batch: error(x, y, batch) + jnp.exp(x["strength"]) @ y**2,
        blocks=m,
        upper_data=held,
        lower_data=fitted,
    )
    x0 = {"strength": jnp.zeros(d), "scaling": jnp.zeros(d)}
    return solved(problem, x0, jnp.zeros((m, d)), 6000, 10, 8)


def proximal_prior(m: int = 300, d: int = 10) -> Case:
    """Linear tasks of few rows around a shared prior: y_i is near x, and F is of how well it adapts."""
    random = np.random.default_rng(2)
    centre = random.normal(size=d)
    tasks = centre + 0.3 * random.normal(size=(m, d))
    spread = np.geomspace(0.1, 3.0, d)

    def rows(count: int) -> bx.PerBlock:
        features = random.normal(size=(m, count, d)) * spread
        targets = np.einsum("mnd,md->mn", features, tasks) + 0.1 * random.normal(size=(m, count))
        flat = {"row": features.reshape(-1, d), "y": targets.reshape(-1)}
        return bx.PerBlock(
            {name: array.astype(np.float32) for name, array in flat.items()}, np.arange(m + 1) * count
        )

    def error(y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(y, batch),
        lower=lambda x, y, block, batch: error(y, batch) + 0.1 * jnp.sum((y - x) ** 2),
        blocks=m,
        upper_data=rows(20),
        lower_data=rows(5),
    )
    return solved(problem, jnp.zeros(d), jnp.zeros((m, d)), 6000, 10, 8)


def log_mean_exp(m: int = 30, d: int = 10) -> Case:
    """The mean over groups of a log of a mean of exponentials: a tracked mean under a log."""
    random = np.random.default_rng(3)
    centres = random.normal(size=(m, 1, d))
    rows = (centres + random.normal(size=(m, 100, d))).reshape(-1, d).astype(np.float32)
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.log(y),
        lower=bx.mean(lambda x, block, batch: jnp.mean(jnp.exp(0.5 * jnp.mean((batch - x) ** 2, -1)))),
        blocks=m,
        lower_data=bx.PerBlock(rows, np.arange(m + 1) * 100),
    )
    return solved(problem, jnp.full(d, 1.0), None, 6000, 10, 8)


def single(name: str) -> Case:
    """A problem of one block with real data: strengths per feature (a8a, w8a), or weights of rows (mnist)."""
    folder = Path(os.environ["BILEVAX_DATA"])
    case = cleaning(folder) if name == "mnist" else regularised(name, folder)
    return Case(
        case.problem, case.x0, case.y0, 4000, None, 64, lambda x: case.value(x, case.y0[0]), None
    )  # fmt: skip


def noisy(name: str, n: int = 4000, clean: int = 200, m: int = 20) -> Case:
    """Weights of the rows of a8a or w8a, of which a third has a wrong label."""
    folder, width = Path(os.environ["BILEVAX_DATA"]), WIDTHS[name]
    rows, labels = load_svmlight_file(str(folder / "libsvm" / name), n_features=width)
    random = np.random.default_rng(4)
    order = random.permutation(len(labels))[: n + clean]
    features, labels = rows[order].toarray().astype(np.float32), labels[order].astype(np.float32)
    given = np.where(random.random(n) < 1 / 3, -labels[:n], labels[:n])

    def loss(y: Any, block: Any, batch: Any) -> jax.Array:
        return jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.mean(loss(y, block, batch)),
        lower=lambda x, y, block, batch: (
            jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * loss(y, block, batch)) + 0.5e-3 * y @ y
        ),
        blocks=jnp.linspace(1.0, 11.0, m, endpoint=False),
        upper_data=bx.Shared({"row": features[n:], "label": labels[n:]}),
        lower_data=bx.Shared({"row": features[:n], "label": given, "index": jnp.arange(n)}),
    )
    return dataclasses.replace(
        solved(problem, jnp.zeros(n), jnp.zeros((m, width)), 4000, 5, 32), evaluations=60
    )


def sine_tasks(m: int = 200, width: int = 12) -> Case:
    """Sine waves of random phase and amplitude, ten points each; x is a prior of the weights of a network."""
    random = np.random.default_rng(5)
    height, phase = random.uniform(0.1, 5, (m, 1)), random.uniform(0, np.pi, (m, 1))

    def rows(count: int) -> bx.PerBlock:
        place = random.uniform(-5, 5, (m, count))
        both = {"x": place, "y": height * np.sin(place - phase)}
        flat = {name: array.reshape(-1).astype(np.float32) for name, array in both.items()}
        return bx.PerBlock(flat, np.arange(m + 1) * count)

    def error(y: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"][:, None] * y["in"] + y["bias"])
        hidden = jnp.tanh(hidden @ y["middle"] + y["shift"])
        return jnp.mean((hidden @ y["out"] - batch["y"]) ** 2)

    def near(x: Any, y: Any) -> jax.Array:
        return 0.5 * sum(jnp.sum((x[name] - y[name]) ** 2) for name in x)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: error(y, batch),
        lower=lambda x, y, block, batch: error(y, batch) + near(x, y),
        blocks=m,
        upper_data=rows(20),
        lower_data=rows(10),
    )
    shapes = {"in": (width,), "bias": (width,), "middle": (width, width), "shift": (width,), "out": (width,)}
    x0 = {n: jnp.asarray(random.normal(size=s) / s[0] ** 0.5, jnp.float32) for n, s in shapes.items()}
    y0 = jax.tree.map(lambda a: jnp.broadcast_to(a, (m, *a.shape)), x0)

    @jax.jit
    def value(x: PyTree) -> jax.Array:
        """F, with every y by many steps of Adam from x: g has many minima."""
        step = optax.adam(1e-2)

        def adapted(train: Any, test: Any) -> jax.Array:
            def turn(carry: Any, _: Any) -> Any:
                y, state = carry
                slope = jax.grad(lambda y: error(y, train) + near(x, y))(y)
                moves, state = step.update(slope, state)
                return (optax.apply_updates(y, moves), state), None

            (y, _), _ = jax.lax.scan(turn, (x, step.init(x)), None, length=1000)
            return error(y, test)

        def by_task(source: bx.PerBlock) -> Any:
            return jax.tree.map(lambda a: a.reshape(m, -1), source.rows)

        return jnp.mean(jax.vmap(adapted)(by_task(problem.lower_data[0]), by_task(problem.upper_data)))

    return Case(problem, x0, y0, 6000, 20, 10, lambda x: float(value(x)), None)


def scaled(case: Case, x: float = 1.0, y: float = 1.0, value: float = 1.0) -> Case:
    """The same case in other units of x, of y and of F; for single argmin levels."""
    problem = case.problem
    (level,) = problem.levels.values()
    smaller = functools.partial(jax.tree.map, lambda a, by=x: a / by)
    upper, lower = problem.upper, level.function

    def changed_y(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: a / y, tree)

    changed = bx.Problem(
        lambda u, w, block, batch: value * upper(smaller(u), changed_y(w), block, batch),
        lambda u, w, block, batch: lower(smaller(u), changed_y(w), block, batch),
        problem.blocks,
        problem.upper_data,
        problem.lower_data[0],
    )

    def both(u: PyTree) -> tuple[float, PyTree]:
        assert case.value_and_gradient is not None
        found, gradient = case.value_and_gradient(smaller(u))
        return value * found, jax.tree.map(lambda a: value * a / x, gradient)

    return dataclasses.replace(
        case,
        problem=changed,
        x0=jax.tree.map(lambda a: a * x, case.x0),
        y0=jax.tree.map(lambda a: a * y, case.y0),
        value=lambda u: value * case.value(smaller(u)),
        value_and_gradient=both,
    )


KINDS = ("quadratic", "ridge", "logistic", "mean", "mixture", "pl")
CASES: dict[str, Callable[[], Case]] = {
    f"{kind}, κ = {conditioning:g}, noise {noise:g}": functools.partial(of_family, kind, conditioning, noise)
    for kind, conditioning, noise in itertools.product(KINDS, (3.0, 30.0), (0.3, 1.0))
} | {
    "reweighting (quick start)": reweighting,
    "folds of breast cancer": folds,
    "panel of ridges": panel,
    "proximal prior": proximal_prior,
    "log-mean-exp": log_mean_exp,
    "sine tasks": sine_tasks,
    **NEWCOMERS,
    "a8a, weights of rows": functools.partial(noisy, "a8a"),
    "w8a, weights of rows": functools.partial(noisy, "w8a"),
    "a8a, strengths, m = 1": functools.partial(single, "a8a"),
    "w8a, strengths, m = 1": functools.partial(single, "w8a"),
    "MNIST, weights of rows, m = 1": functools.partial(single, "mnist"),
}
