"""`bilevax reproduce noise --protocol paper`: the paper's table of test accuracies, by the paper's own rules.

Of a8a, 80% of the rows are for training and 20%, which stay clean, for validation. 70% of the positive
training rows are removed, and a share of the training labels is flipped; noise 0* does neither. Compared are

- logistic regression on the noisy rows by SGD, with a step from the paper's grid;
- BSVRB v1 on the bilevel problem with m = 1 and temperature 1;
- BSVRB v1, and as one more column v2, with m = 100 temperatures drawn at random from [1, 11).

F is the loss on all validation rows, and the model (its step and its block) is the one with the best accuracy
on the same rows. Hyper-parameters are points of the paper's grids: as many for every bilevel method, chosen
by that accuracy on a split of their own. The paper prints no number of steps and no β: all methods draw the
same number of rows, and β is 0.1. α = 10 and 100 of its grid are refused: they are no weights of an average.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.reweighting import Reweighting, as_rows, cross_entropy, products, reweighting
from bilevax.data import Dataset, load
from bilevax.experiments import figures, tune
from bilevax.experiments.kept import Kept, Task
from bilevax.experiments.noise import CONFIG, PAPER, PLAIN, corrupt, part_of
from bilevax.experiments.noise_baselines import NoisySplit
from bilevax.experiments.report import Report, spread

SPREAD = {  # the standard deviations that the paper prints beside `PAPER`
    "0*": (0.0005, 0.0002, 0.0011),
    "0": (0.0009, 0.0016, 0.0013),
    "0.1": (0.0034, 0.0100, 0.0025),
    "0.2": (0.0066, 0.0090, 0.0024),
    "0.3": (0.0081, 0.0047, 0.0015),
    "0.4": (0.0025, 0.0079, 0.0013),
}
STEPS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5)  # of logistic regression, as printed
BILEVEL = {"m = 1": (bx.BSVRBv1, 1), "m = 100": (bx.BSVRBv1, 100), "m = 100, v2": (bx.BSVRBv2, 100)}
PRINTED = (PLAIN, "m = 1", "m = 100")
LOOKS = 30  # at a run, evenly spaced: the iterates that may be chosen


@dataclasses.dataclass(frozen=True)
class PaperNoiseOptions:
    """The options of `bilevax reproduce noise --protocol paper`.

    Attributes:
      seeds: number of splits, each with its own corruptions and temperatures.
      first_seed: the first seed.
      tuning_seed: of the split that chooses hyper-parameters.
      noises: noise levels.
      settings: points of the paper's grid that every bilevel method tries: as many for every λ.
      steps: of every bilevel run. Logistic regression draws as many rows: I times as many steps.
      rows: number of training and of test rows to use; None uses all.
    """

    seeds: int = 3
    first_seed: int = 0
    tuning_seed: int = 100
    noises: tuple[str, ...] = tuple(PAPER)
    settings: int = 8
    steps: int = 1000
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.settings % len(tune.RIDGES):
            raise ValueError(f"settings must be a multiple of {len(tune.RIDGES)}, got {self.settings}")
        for noise in self.noises:
            if noise not in PAPER:
                raise ValueError(f"noises must be among {list(PAPER)}, got {noise!r}")

    def quick(self) -> PaperNoiseOptions:
        """A short check: one noise level and seed, few settings, steps and rows."""
        return dataclasses.replace(self, seeds=1, noises=("0.4",), settings=4, steps=200, rows=1500)


def run(
    options: PaperNoiseOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    processes: int = 1,
) -> list[dict[str, Any]]:
    """Fits everything; writes a table and a plot to a folder.

    Every result is kept in `kept.json` as it comes; `resume` runs only what is missing there.

    Returns:
      The rows of the table, with one entry per seed.
    """
    options = options.quick() if quick else options
    report = Report(folder, options, quick=quick)
    results = compute(options, report.folder, resume=resume, processes=processes)
    rows, chosen = [], {}
    for noise in options.noises:
        row: dict[str, Any] = {"noise": noise}
        for name in (PLAIN, *BILEVEL):
            found = results[f"{noise}, {name}"]
            row[name] = np.array(found["accuracy"])
            chosen.setdefault(noise, {})[name] = found["settings"]
            if name == "m = 100":
                row["largest |x|"] = max(found["moved"])
        rows.append(row)
    report.fact("chosen settings", chosen)
    note = (
        f"mean ± standard deviation of {options.seeds} seeds; paper: as published, of 3 seeds. v2 is not in "
        "the paper's table. largest |x|: of the logits of the rows' weights after m = 100, which begin at 0. "
        f"Of each bilevel method {options.settings} points of the paper's grid were tried at every noise "
        f"level, of logistic regression all {len(STEPS)} steps."
    )
    report.table("noise_paper", [_shown(row) for row in rows], "Noisy labels by the paper's protocol", note)
    caption = "Test accuracy by noise level; dashes: the paper's figures."
    report.figure("noise_paper", _plot(rows), figures.spread_caption(caption, options.seeds))
    report.finish()
    return rows


def compute(
    options: PaperNoiseOptions, folder: Path, *, resume: bool = False, processes: int = 1
) -> dict[str, Any]:
    """Everything that takes long: the settings and accuracies of every method at every noise level."""
    shared = dataclasses.replace(options, noises=())  # which levels were asked for is not part of a result
    kept = Kept(folder / "kept.json", shared, resume=resume)
    cases = [
        (name, noise, place)
        for name in reversed(BILEVEL)
        for noise in options.noises
        for place in range(len(tune.RIDGES))
    ]
    tried = kept.fill(
        {_tried(*case): functools.partial(_scores, *case, options) for case in cases}, processes
    )
    tasks: dict[str, Task] = {}
    for name in (*BILEVEL, PLAIN):
        for noise in options.noises:
            scores = [tried[_tried(name, noise, p)] for p in range(len(tune.RIDGES)) if name != PLAIN]
            tasks[f"{noise}, {name}"] = functools.partial(_column, name, noise, scores, options)
    return kept.fill(tasks, processes)


def _tried(name: str, noise: str, place: int) -> str:
    return f"{noise}, {name}, λ = {tune.RIDGES[place]:g}"


def _inputs(options: PaperNoiseOptions) -> tuple[Dataset, dict[str, Any]]:
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    return part_of(load(config["data"]), options.rows), config


def _points(name: str, place: int, options: PaperNoiseOptions) -> dict[str, np.ndarray]:
    """The points of the paper's grid that are tried with one λ, as columns."""
    method, each = BILEVEL[name][0], options.settings // len(tune.RIDGES)
    return tune.draw_trials(tune.PAPER[method.__name__], each, seed=place)


def _scores(name: str, noise: str, place: int, options: PaperNoiseOptions) -> list[float]:
    """The validation accuracies of a method with one λ, on the split that chooses hyper-parameters."""
    data, config = _inputs(options)
    split, columns = corrupt(data, noise, options.tuning_seed, config), _points(name, place, options)
    ridge, seeds = tune.RIDGES[place], [options.tuning_seed]
    return list(_bilevel([split], seeds, name, ridge, columns, config, options).score[:, 0])


def _column(name: str, noise: str, scores: list[list[float]], options: PaperNoiseOptions) -> dict[str, Any]:
    """Test accuracies of a method at a noise level, one per seed, with the best settings by `scores`."""
    data, config = _inputs(options)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    splits = [corrupt(data, noise, seed, config) for seed in seeds]
    if name == PLAIN:
        tuning, steps = corrupt(data, noise, options.tuning_seed, config), options.steps
        steps *= config["blocks_per_step"]
        found = _logistic([tuning], STEPS, steps, config["batch_size"])[0]
        best = STEPS[int(np.argmax(found[:, 0]))]
        _, accuracy = _logistic(splits, (best,), steps, config["batch_size"])
        return {"settings": {"step": best}, "accuracy": accuracy[0]}
    place, row = np.unravel_index(np.argmax(scores), np.shape(scores))
    single = {key: column[row : row + 1] for key, column in _points(name, int(place), options).items()}
    ridge = tune.RIDGES[place]
    found = _bilevel(splits, list(seeds), name, ridge, single, config, options)
    settings = {"ridge": ridge} | {key: float(column[0]) for key, column in single.items()}
    return {"settings": settings, "accuracy": found.accuracy[0], "moved": found.moved[0]}


class Judged(bx.Shared):
    """The rows of F, which also choose a model, and the test rows that it is judged by."""

    test: dict[str, Any]

    def __init__(self, rows: Any, test: Any):
        super().__init__(rows)
        self.test = jax.tree.map(jnp.asarray, test)


class Found(NamedTuple):
    """Of runs by setting and split: validation and test accuracy of the chosen model, and the largest |x|."""

    score: np.ndarray
    accuracy: np.ndarray
    moved: np.ndarray


def _bilevel(
    splits: list[NoisySplit],
    seeds: list[int],
    name: str,
    ridge: float,
    columns: dict[str, np.ndarray],
    config: dict[str, Any],
    options: PaperNoiseOptions,
) -> Found:
    """Runs a method on all splits with all settings."""
    method, blocks = BILEVEL[name]
    tasks = [_task(split, blocks, seed, ridge) for split, seed in zip(splits, seeds, strict=True)]
    swept = bx.sweep(
        [task.problem for task in tasks],
        tasks[0].x0,
        tasks[0].y0,
        solver=method,
        settings={key: list(column) for key, column in columns.items()},
        steps=options.steps,
        keys=jax.random.split(jax.random.key(0), len(tasks)),
        blocks_per_step=min(config["blocks_per_step"], blocks),
        batch_size=config["batch_size"],
        metrics={"validation": _chosen_on_validation, "test": _tested},
        every=max(1, options.steps // LOOKS),
    )
    score, accuracy = _chosen(swept.history["validation"], swept.history["test"])
    return Found(score, accuracy, np.abs(np.asarray(swept.x)).max(-1))


def _task(split: NoisySplit, blocks: int, seed: int, ridge: float) -> Reweighting:
    """The paper's problem on a split."""
    heat = [1.0] if blocks == 1 else np.random.default_rng(seed).uniform(1, 11, blocks)
    task = reweighting(split.X, split.y, split.X_clean, split.y_clean, temperatures=heat, ridge=ridge)
    test = {"row": as_rows(split.X_test, intercept=True), "label": (split.y_test > 0).astype(np.int32)}
    rows = Judged(cast(bx.Shared, task.problem.upper_data).rows, test)
    return dataclasses.replace(task, problem=eqx.tree_at(lambda one: one.upper_data, task.problem, rows))


def _accuracies(rows: dict[str, Any], y: Array) -> Array:
    """The accuracy of every block's model, (m,); −1 if the model is not finite."""

    def one(y: Array) -> Array:
        right = jnp.mean((products(rows["row"], y) > 0) == (rows["label"] == 1))
        return jnp.where(jnp.all(jnp.isfinite(y)), right, -1.0)

    return jax.lax.map(one, y)


def _chosen_on_validation(problem: bx.Problem, state: bx.State) -> Array:
    return jnp.max(_accuracies(cast(Judged, problem.upper_data).rows, state.y))


def _tested(problem: bx.Problem, state: bx.State) -> Array:
    data = cast(Judged, problem.upper_data)
    best = jnp.argmax(_accuracies(data.rows, state.y))
    return _accuracies(data.test, state.y[best][None])[0]


def _chosen(validation: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both accuracies at the look, along the last axis, with the best validation accuracy."""
    validation = np.where(np.isfinite(validation), validation, -1.0)
    best = np.argmax(validation, axis=-1)[..., None]
    return np.take_along_axis(validation, best, -1)[..., 0], np.take_along_axis(test, best, -1)[..., 0]


def _logistic(
    splits: list[NoisySplit], sizes: tuple[float, ...], steps: int, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Validation and test accuracies of logistic regression by SGD, (step sizes, splits)."""
    validation, test = [], []
    for split in splits:
        noisy, clean, tested = (
            {"row": as_rows(X, intercept=True), "label": (y > 0).astype(np.int32)}
            for X, y in ((split.X, split.y), (split.X_clean, split.y_clean), (split.X_test, split.y_test))
        )
        found = _descend(jnp.asarray(sizes), noisy, clean, tested, steps, batch)
        validation.append(found[0])
        test.append(found[1])
    return _chosen(np.stack(validation, 1), np.stack(test, 1))


@functools.partial(jax.jit, static_argnames=("steps", "batch"))
def _descend(
    sizes: Array, noisy: Any, clean: Any, tested: Any, steps: int, batch: int
) -> tuple[Array, Array]:
    """SGD from zero with every step size; accuracies on clean and test rows, (step sizes, looks)."""
    rows, labels = noisy["row"]["dense"], noisy["label"]

    def loss(y: Array, places: Array) -> Array:
        return jnp.mean(cross_entropy(rows[places] @ y, labels[places]))

    def step(y: Array, key: Array) -> tuple[Array, None]:
        places = jax.random.randint(key, (batch,), 0, len(labels))
        slopes = jax.vmap(lambda one: jax.grad(loss)(one, places))(y)
        return y - sizes[:, None] * slopes, None

    def look(y: Array, keys: Array) -> tuple[Array, tuple[Array, Array]]:
        y, _ = jax.lax.scan(step, y, keys)
        return y, (_accuracies(clean, y), _accuracies(tested, y))

    keys = jax.random.split(jax.random.key(0), (LOOKS, max(1, steps // LOOKS)))
    _, seen = jax.lax.scan(look, jnp.zeros((len(sizes), rows.shape[1])), keys)
    return seen[0].T, seen[1].T


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as text, with the published figures."""
    out: dict[str, Any] = {"noise": row["noise"]}
    out |= {name: spread(row[name]) for name in (PLAIN, *BILEVEL)}
    published = zip(PRINTED, PAPER[row["noise"]], SPREAD[row["noise"]], strict=True)
    out |= {f"paper, {name}": f"{mean:.4f} ± {sd:.4f}" for name, mean, sd in published}
    return out | {"largest |x|": f"{row['largest |x|']:.1e}"}


@figures.styled
def _plot(rows: list[dict[str, Any]]) -> Any:
    figure, ((axis,),) = figures.panels(1, 1, width=figures.PAGE)
    names = (PLAIN, *BILEVEL)
    series = {name: [row[name] for row in rows] for name in names}
    places = figures.bars(axis, [row["noise"] for row in rows], series, figures.styles_of(names))
    for number, name in enumerate(PRINTED):
        published = [PAPER[row["noise"]][number] for row in rows]
        axis.plot(places[name], published, "k_", markersize=7, label="the paper" if name == PLAIN else None)
    axis.set(xlabel="noise", ylabel="test accuracy", ylim=(0.7, 0.87))
    figures.legend_of_all(figure, columns=5)
    return figure
