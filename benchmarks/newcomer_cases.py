"""Problems as people bring them: other data and other losses than those that the defaults were made with.

They are cases of `benchmarks.defaults`. Nothing about them is chosen to suit a method: features in their own
units, blocks of very different lengths, many tiny blocks, lower problems that are networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from benchmarks.solved_case import Case, solved

Array = np.ndarray


def own_rows(rows: dict[str, Array], lengths: Sequence[int] | Array) -> bx.PerBlock:
    """Rows of blocks, one block after the other; floats in 32 bits."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    floats = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in rows.items()}
    return bx.PerBlock(floats, offsets)


def by_fold(rows: dict[str, Array], count: int, seed: int) -> tuple[bx.PerBlock, bx.PerBlock]:
    """The rows of each fold, which judge, and those outside of it, which fit."""
    total = len(next(iter(rows.values())))
    fold = np.random.default_rng(seed).permutation(total) % count

    def of(member: Callable[[int], Array]) -> bx.PerBlock:
        parts = [np.flatnonzero(member(one)) for one in range(count)]
        order = np.concatenate(parts)
        return own_rows({name: a[order] for name, a in rows.items()}, [len(part) for part in parts])

    return of(lambda one: fold == one), of(lambda one: fold != one)


def wine_folds(scaled: bool, count: int = 8) -> Case:
    """A strength per feature of a softmax regression with three classes, features scaled or not."""
    from sklearn.datasets import load_wine

    data = load_wine()
    features = (data.data - data.data.mean(0)) / (data.data.std(0) if scaled else 1.0)
    judge, fit = by_fold({"row": features, "label": data.target.astype(np.int32)}, count, 1)

    def loss(y: Any, batch: Any) -> jax.Array:
        scores = batch["row"] @ y["w"] + y["b"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), batch["label"][:, None], 1))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: (
            loss(y, batch) + jnp.sum(jnp.exp(x)[:, None] * y["w"] ** 2) + 1e-3 * jnp.sum(y["b"] ** 2)
        ),
        blocks=count,
        upper_data=judge,
        lower_data=fit,
    )
    y0 = {"w": jnp.zeros((count, 13, 3)), "b": jnp.zeros((count, 3))}
    return solved(problem, jnp.full(13, -4.0), y0, 4000, 4, 16)


def diabetes_folds(count: int = 12) -> Case:
    """A strength per feature of a ridge regression, targets in their own units (25 to 346)."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    features = (data.data - data.data.mean(0)) / data.data.std(0)
    judge, fit = by_fold({"row": features, "y": data.target.astype(float)}, count, 2)

    def loss(y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ y["w"] + y["b"] - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x) @ y["w"] ** 2,
        blocks=count,
        upper_data=judge,
        lower_data=fit,
    )
    y0 = {"w": jnp.zeros((count, 10)), "b": jnp.zeros(count)}
    return solved(problem, jnp.zeros(10), y0, 4000, 4, 16)


def digits_cleaning(n: int = 600, clean: int = 200, m: int = 10) -> Case:
    """A weight per noisy row of digits; a block is one class against the others."""
    from sklearn.datasets import load_digits

    data = load_digits()
    random = np.random.default_rng(3)
    order = random.permutation(len(data.target))[: n + clean]
    rows, labels = data.data[order] / 16.0, data.target[order]
    given = np.where(random.random(n) < 0.35, random.integers(0, 10, n), labels[:n])

    def loss(y: Any, digit: Any, batch: Any) -> jax.Array:
        sign = jnp.where(batch["label"] == digit, 1.0, -1.0)
        return jax.nn.softplus(-sign * (batch["row"] @ y["w"] + y["b"]))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.mean(loss(y, block, batch)),
        lower=lambda x, y, block, batch: (
            jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * loss(y, block, batch))
            + 0.5e-2 * (y["w"] @ y["w"] + y["b"] ** 2)
        ),
        blocks=jnp.arange(m),
        upper_data=bx.Shared({"row": rows[n:].astype(np.float32), "label": labels[n:].astype(np.int32)}),
        lower_data=bx.Shared(
            {"row": rows[:n].astype(np.float32), "label": given.astype(np.int32), "index": np.arange(n)}
        ),
    )
    y0 = {"w": jnp.zeros((m, 64)), "b": jnp.zeros(m)}
    return solved(problem, jnp.zeros(n), y0, 4000, 4, 32)


def poisson_shops(m: int = 300, d: int = 6) -> Case:
    """Counts per day and shop, a Poisson regression per shop; means and strengths are shared."""
    random = np.random.default_rng(4)
    centre, spread = random.normal(size=d) * 0.5, np.geomspace(0.05, 0.6, d)
    own = centre + spread * random.normal(size=(m, d))

    def days(lengths: Array) -> bx.PerBlock:
        owner = np.repeat(np.arange(m), lengths)
        rows = np.column_stack([np.ones(len(owner)), random.normal(size=(len(owner), d - 1))])
        rate = np.exp(np.clip(np.sum(rows * own[owner], 1), -4, 4))
        return own_rows({"row": rows, "count": random.poisson(rate).astype(float)}, lengths)

    def loss(y: Any, batch: Any) -> jax.Array:
        score = batch["row"] @ y
        return jnp.mean(jnp.exp(score) - batch["count"] * score)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x["strength"]) @ (y - x["centre"]) ** 2,
        blocks=m,
        upper_data=days(np.full(m, 20)),
        lower_data=days(random.integers(3, 40, m)),
    )
    x0 = {"strength": jnp.zeros(d), "centre": jnp.zeros(d)}
    return solved(problem, x0, jnp.zeros((m, d)), 4000, 10, 16)


def few_shot_classes(m: int = 500, d: int = 12) -> Case:
    """Logistic regressions of eight rows around a prior with strengths of its own."""
    random = np.random.default_rng(5)
    centre = random.normal(size=d)
    own = centre + random.normal(size=(m, d)) * np.geomspace(0.1, 2, d)

    def rows(count: int) -> bx.PerBlock:
        features = random.normal(size=(m, count, d))
        chance = 1 / (1 + np.exp(-np.einsum("mnd,md->mn", features, own)))
        labels = np.where(random.random((m, count)) < chance, 1.0, -1.0)
        return own_rows({"row": features.reshape(-1, d), "label": labels.reshape(-1)}, np.full(m, count))

    def loss(y: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-batch["label"] * (batch["row"] @ y)))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x["strength"]) @ (y - x["prior"]) ** 2,
        blocks=m,
        upper_data=rows(20),
        lower_data=rows(8),
    )
    x0 = {"strength": jnp.full(d, -3.0), "prior": jnp.zeros(d)}
    return solved(problem, x0, jnp.zeros((m, d)), 4000, 20, 8)


def group_risk(m: int = 40, d: int = 8) -> Case:
    """Tilted losses of groups of very different sizes: a log of a tracked mean of exponentials."""
    random = np.random.default_rng(6)
    lengths = random.integers(5, 300, m)
    owner = np.repeat(np.arange(m), lengths)
    rows = random.normal(size=(len(owner), d))
    truth = random.normal(size=d) + 0.7 * random.normal(size=(m, d))
    targets = np.sum(rows * truth[owner], 1) + 0.3 * random.normal(size=len(owner))

    def tilted(x: Any, block: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.exp(0.2 * jnp.minimum((batch["row"] @ x - batch["y"]) ** 2, 40.0)))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.log(y) / 0.2,
        lower=bx.mean(tilted),
        blocks=m,
        lower_data=own_rows({"row": rows, "y": targets}, lengths),
    )
    return solved(problem, jnp.zeros(d), None, 4000, 8, 16)


def group_rmse(m: int = 60, d: int = 6) -> Case:
    """The mean over groups of the root of a mean squared error, in units up to 400 times apart."""
    random = np.random.default_rng(7)
    lengths = random.integers(10, 120, m)
    owner = np.repeat(np.arange(m), lengths)
    size = np.exp(random.uniform(-3, 3, m))
    rows = random.normal(size=(len(owner), d))
    truth = random.normal(size=d)
    noise = random.normal(size=len(owner)) * size[owner]
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sqrt(y),
        lower=bx.mean(lambda x, block, batch: jnp.mean((batch["row"] @ x - batch["y"]) ** 2)),
        blocks=m,
        lower_data=own_rows({"row": rows, "y": rows @ truth + noise}, lengths),
    )
    return solved(problem, jnp.zeros(d), None, 4000, 10, 16)


def representation(m: int = 120, d: int = 20, k: int = 4) -> Case:
    """A linear map to few features that all tasks share, and a ridge regression per task on top."""
    random = np.random.default_rng(8)
    basis = np.linalg.qr(random.normal(size=(d, k)))[0]
    heads = random.normal(size=(m, k))

    def rows(count: int) -> bx.PerBlock:
        features = random.normal(size=(m, count, d))
        targets = np.einsum("mnd,dk,mk->mn", features, basis, heads) + 0.2 * random.normal(size=(m, count))
        return own_rows({"row": features.reshape(-1, d), "y": targets.reshape(-1)}, np.full(m, count))

    def loss(x: Any, y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ x @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(x, y, batch),
        lower=lambda x, y, block, batch: loss(x, y, batch) + 0.05 * y @ y,
        blocks=m,
        upper_data=rows(15),
        lower_data=rows(10),
    )
    x0 = jnp.asarray(random.normal(size=(d, k)) * 0.2, jnp.float32)
    return solved(problem, x0, jnp.zeros((m, k)), 4000, 12, 8)


def distillation(m: int = 6, points: int = 8) -> Case:
    """Made-up rows, on which a softmax regression does well on real ones; a block is a ridge strength."""
    from sklearn.datasets import load_iris

    data = load_iris()
    rows = ((data.data - data.data.mean(0)) / data.data.std(0)).astype(np.float32)
    labels = jax.nn.one_hot(jnp.arange(points) % 3, 3)

    def loss(y: Any, rows: Any, targets: Any) -> jax.Array:
        return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(rows @ y["w"] + y["b"]), -1))

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch["row"], jax.nn.one_hot(batch["label"], 3)),
        lower=lambda x, y, block, batch: (
            loss(y, x, labels) + block * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))
        ),
        blocks=jnp.geomspace(0.01, 0.1, m),
        upper_data=bx.Shared({"row": rows, "label": data.target.astype(np.int32)}),
    )
    x0 = jnp.asarray(np.random.default_rng(9).normal(size=(points, 4)) * 0.3, jnp.float32)
    y0 = {"w": jnp.zeros((m, 4, 3)), "b": jnp.zeros((m, 3))}
    return solved(problem, x0, y0, 4000, 3, 32)


def tiny_blocks(m: int = 20_000) -> Case:
    """As many models as customers, three rows each, and one strength and centre per coefficient."""
    random = np.random.default_rng(10)
    own = np.array([1.0, -0.5]) + random.normal(size=(m, 2)) * [0.5, 0.1]

    def rows(count: int) -> bx.PerBlock:
        features = random.normal(size=(m, count, 2))
        targets = np.einsum("mnd,md->mn", features, own) + random.normal(size=(m, count))
        return own_rows({"row": features.reshape(-1, 2), "y": targets.reshape(-1)}, np.full(m, count))

    def loss(y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x["strength"]) @ (y - x["centre"]) ** 2,
        blocks=m,
        upper_data=rows(3),
        lower_data=rows(3),
    )
    x0 = {"strength": jnp.zeros(2), "centre": jnp.zeros(2)}
    return solved(problem, x0, jnp.zeros((m, 2)), 4000, 200, 3)


def kernel_scales(m: int = 15, n: int = 20, d: int = 4) -> Case:
    """Kernel ridge regressions whose length scales, one per feature, and noise are shared by all tasks."""
    random = np.random.default_rng(11)
    places = random.uniform(-2, 2, (m, 2 * n, d))
    wave = random.normal(size=(m, 2)) + np.array([2.0, 0.5])
    values = np.sin(places[..., :2] * wave[:, None]).sum(-1) + 0.1 * random.normal(size=(m, 2 * n))

    def kernel(x: Any, a: Any, b: Any) -> jax.Array:
        gaps = (a[:, None] - b[None]) * jnp.exp(x["scale"])
        return jnp.exp(-0.5 * jnp.sum(gaps**2, -1))

    def upper(x: Any, y: Any, block: Any, batch: Any) -> jax.Array:
        return jnp.mean((kernel(x, block["place"][n:], block["place"][:n]) @ y - block["value"][n:]) ** 2)

    def lower(x: Any, y: Any, block: Any, batch: Any) -> jax.Array:
        own = kernel(x, block["place"][:n], block["place"][:n])
        left = own @ y - block["value"][:n]
        return jnp.mean(left**2) + jnp.exp(x["noise"]) * y @ (own @ y) / n + 1e-4 * y @ y

    blocks = {"place": jnp.asarray(places, jnp.float32), "value": jnp.asarray(values, jnp.float32)}
    problem = bx.Problem(upper=upper, lower=lower, blocks=blocks)
    x0 = {"scale": jnp.full(d, -0.5), "noise": jnp.asarray(-2.0)}
    return solved(problem, x0, jnp.zeros((m, n)), 4000, 5, 1)


def odd_units(m: int = 100, d: int = 5) -> Case:
    """Ridge regressions with features from metres to microns, and targets in thousands."""
    random = np.random.default_rng(12)
    unit, common = 10.0 ** np.array([-3, -1, 0, 1, 3]), random.normal(size=d)
    own = common + 0.5 * random.normal(size=(m, d))

    def rows(count: int) -> bx.PerBlock:
        features = random.normal(size=(m, count, d))
        targets = 1000 * (np.einsum("mnd,md->mn", features, own) + random.normal(size=(m, count)))
        flat = (features * unit).reshape(-1, d)
        return own_rows({"row": flat, "y": targets.reshape(-1)}, np.full(m, count))

    def loss(y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x) @ y**2,
        blocks=m,
        upper_data=rows(15),
        lower_data=rows(12),
    )
    return solved(problem, jnp.zeros(d), jnp.zeros((m, d)), 4000, 10, 8)


def small_networks(m: int = 60, width: int = 5) -> Case:
    """A network of one hidden layer per task, with penalties per layer and a common scale of the inputs."""
    random = np.random.default_rng(13)
    shift = random.uniform(-1, 1, (m, 1))

    def rows(count: int) -> bx.PerBlock:
        place = random.uniform(-2, 2, (m, count))
        value = np.tanh(2 * (place - shift)) + 0.3 * random.normal(size=(m, count))
        return own_rows({"x": place.reshape(-1), "y": value.reshape(-1)}, np.full(m, count))

    def loss(x: Any, y: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(jnp.exp(x["scale"]) * batch["x"][:, None] * y["in"] + y["bias"])
        return jnp.mean((hidden @ y["out"] - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(x, y, batch),
        lower=lambda x, y, block, batch: (
            loss(x, y, batch)
            + jnp.exp(x["strength"]) @ jnp.stack([jnp.sum(y[name] ** 2) for name in ("in", "bias", "out")])
        ),
        blocks=m,
        upper_data=rows(20),
        lower_data=rows(10),
    )
    x0 = {"scale": jnp.zeros(()), "strength": jnp.full(3, -2.0)}
    start = random.normal(size=(3, width)) * 0.5
    y0 = {
        name: jnp.broadcast_to(jnp.asarray(one, jnp.float32), (m, width))
        for name, one in zip(("in", "bias", "out"), start, strict=True)
    }
    return solved(problem, x0, y0, 4000, 10, 10)


def huber_sensors(m: int = 80, d: int = 10) -> Case:
    """Sensors with outliers: Huber's loss below and above, a strength and a weight per feature."""
    random = np.random.default_rng(14)
    own = random.normal(size=d) + 0.3 * random.normal(size=(m, d))
    lengths = random.integers(8, 60, m)

    def rows(lengths: Array) -> bx.PerBlock:
        owner = np.repeat(np.arange(m), lengths)
        features = random.standard_t(4, size=(len(owner), d))
        noise = random.standard_t(1.5, size=len(owner))
        return own_rows({"row": features, "y": np.sum(features * own[owner], 1) + noise}, lengths)

    def loss(y: Any, batch: Any) -> jax.Array:
        gap = batch["row"] @ y - batch["y"]
        return jnp.mean(jnp.sqrt(1 + gap**2) - 1)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x["strength"]) @ (y - x["centre"]) ** 2,
        blocks=m,
        upper_data=rows(np.full(m, 25)),
        lower_data=rows(lengths),
    )
    x0 = {"strength": jnp.full(d, -2.0), "centre": jnp.zeros(d)}
    return solved(problem, x0, jnp.zeros((m, d)), 4000, 10, 16)


def wide_ridges(m: int = 30, n: int = 12, d: int = 40) -> Case:
    """More features than rows in every block: only the learnt penalties make the lower problems convex."""
    random = np.random.default_rng(15)
    useful = np.where(np.arange(d) < 6, 1.0, 0.05)
    own = (random.normal(size=d) + 0.4 * random.normal(size=(m, d))) * useful

    def rows(count: int) -> bx.PerBlock:
        features = random.normal(size=(m, count, d))
        targets = np.einsum("mnd,md->mn", features, own) + 0.5 * random.normal(size=(m, count))
        return own_rows({"row": features.reshape(-1, d), "y": targets.reshape(-1)}, np.full(m, count))

    def loss(y: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["row"] @ y - batch["y"]) ** 2)

    problem = bx.Problem(
        upper=lambda x, y, block, batch: loss(y, batch),
        lower=lambda x, y, block, batch: loss(y, batch) + jnp.exp(x) @ y**2,
        blocks=m,
        upper_data=rows(20),
        lower_data=rows(n),
    )
    return solved(problem, jnp.full(d, -3.0), jnp.zeros((m, d)), 4000, 6, 12)


NEWCOMERS: dict[str, Callable[[], Case]] = {
    "wine, folds": lambda: wine_folds(True),
    "wine, folds, own units": lambda: wine_folds(False),
    "diabetes, folds": diabetes_folds,
    "digits, weights of rows": digits_cleaning,
    "Poisson shops": poisson_shops,
    "few-shot classes": few_shot_classes,
    "tilted groups": group_risk,
    "RMSE of groups": group_rmse,
    "representation": representation,
    "distillation": distillation,
    "20,000 tiny blocks": tiny_blocks,
    "kernel scales": kernel_scales,
    "odd units": odd_units,
    "small networks": small_networks,
    "Huber sensors": huber_sensors,
    "wide ridges": wide_ridges,
}
