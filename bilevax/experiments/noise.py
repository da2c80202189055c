"""`bilevax reproduce noise`: test accuracy under noisy labels, beside the paper's and other ways to learn.

Of a8a, 80% are for training and 20%, which stay clean, for validation. From the training rows 70% of the
positives are removed, and a share of the labels is flipped; noise 0* does neither. The test rows are those of
a8a.t. There are two tables:

- the paper's: logistic regression on the noisy rows, and the bilevel problem with m = 1 and m = 100
  temperatures, of which the model with the least loss on validation rows that were kept from F is taken;
- what to do with noisy labels: all or a few of the validation rows are known to be clean, and one fits them
  alone, both parts together, cleanlab's `CleanLearning`, or `ReweightedClassifier`; and how well flipped
  labels are found.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import bilevax as bx
from bilevax.applications.reweighting import Reweighting, as_rows, cross_entropy, products, reweighting
from bilevax.data import Dataset, flip_labels, load, remove_positives, split_rows
from bilevax.experiments.noise_baselines import BASELINES, Corrupted, baselines, plain, without_advice
from bilevax.experiments.report import Report, spread

CONFIG = Path(__file__).parent / "configs" / "noise.json"
PAPER = {  # accuracies of logistic regression, m = 1 and m = 100, in the paper's table
    "0*": (0.8528, 0.8526, 0.8509),
    "0": (0.8442, 0.8426, 0.8477),
    "0.1": (0.8285, 0.8303, 0.8400),
    "0.2": (0.8250, 0.8185, 0.8388),
    "0.3": (0.7929, 0.8118, 0.8239),
    "0.4": (0.7715, 0.7749, 0.8051),
}
PLAIN = "logistic regression"
OURS = "ReweightedClassifier"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `bilevax reproduce noise` is run with.

    Attributes:
      seeds: how many splits, each with corruptions of its own.
      first_seed: the first of them; the settings were chosen on seeds from 100.
      noises: the noise levels of the paper's table.
      user_noises: those of the second table.
      clean: how many clean rows; None for all validation rows.
      steps: of the bilevel runs of the paper's table; None takes the configuration's.
      rows: use only so many training and test rows of the data; None takes all.
      fit: settings of `ReweightedClassifier` other than its defaults.
    """

    seeds: int = 5
    first_seed: int = 0
    noises: tuple[str, ...] = tuple(PAPER)
    user_noises: tuple[str, ...] = ("0.2", "0.3", "0.4")
    clean: tuple[int | None, ...] = (50, 200, 1000, None)
    steps: int | None = None
    rows: int | None = None
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)


def run(settings: Settings, folder: str | Path, *, quick: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Fits everything; writes tables and a plot into a folder.

    Returns:
      The rows of the two tables, with one number per seed, by "paper" and "user".
    """
    if quick:
        settings = dataclasses.replace(
            settings,
            seeds=2,
            noises=("0.4",),
            user_noises=("0.4",),
            clean=(50, None),
            steps=300,
            rows=3000,
            fit={"max_iter": 300, "rounds": 1},
        )
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    report = Report(folder, settings, quick=quick)
    report.fact("configuration", config)
    data = _part(load(config["data"]), settings.rows)
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)

    paper = [_paper_row(data, noise, seeds, config, settings) for noise in settings.noises]
    order = ", ".join(noise for noise, row in zip(settings.noises, paper, strict=True) if _in_order(row))
    report.table(
        "noise",
        [_shown(row) for row in paper],
        "Test accuracy under noisy labels, beside the paper's",
        "mean ± standard deviation over seeds; 'paper' is what the paper reports, 'gain' ours minus that. "
        f"Logistic regression < m = 1 < m = 100 in the mean at noise {order or 'none'}.",
    )
    user = [
        _user_row(data, noise, clean, seeds, config, settings)
        for noise in settings.user_noises
        for clean in settings.clean
    ]
    report.table(
        "noise_clean_rows",
        [_shown(row) for row in user],
        "Test accuracy with a few clean rows",
        "mean ± standard deviation over seeds; 'gain': ReweightedClassifier minus the best of the others in "
        "the mean, ± the standard error of that difference; AUROC: how well wrong labels are found by "
        "label_quality_, and by cleanlab.",
    )
    gains = np.mean([row["gain"].mean() for row in user])
    report.fact("mean gain on the best baseline", float(gains))
    report.figure("noise", _plot(paper, user))
    report.finish()
    return {"paper": paper, "user": user}


def corrupt(
    data: Dataset, noise: str, seed: int, config: dict[str, Any], clean: int | None = None
) -> Corrupted:
    """A split with its corruptions; `clean` keeps only so many validation rows, drawn at random."""
    train, validation = split_rows(data.y, config["validation"], seed=seed, stratify=True)
    if noise != "0*":
        train = train[remove_positives(data.y[train], config["removed"], seed=seed)]
    y, wrong = flip_labels(data.y[train], 0.0 if noise == "0*" else float(noise), seed=seed)
    if clean is not None:
        random = np.random.default_rng(seed)
        validation = random.permutation(validation)
        while len(np.unique(data.y[validation[:clean]])) < 2:  # nothing can be learnt from one class alone
            validation = random.permutation(validation)
        validation = validation[:clean]
    return Corrupted(
        data.X[train], y, wrong, data.X[validation], data.y[validation], data.X_test, data.y_test
    )


class Judged(bx.Shared):
    """Rows that F is made of, and others by which a model is selected: those F has seen would flatter it."""

    held: dict[str, Any]

    def __init__(self, rows: Any, held: Any):
        super().__init__(rows)
        self.held = jax.tree.map(jnp.asarray, held)


def bilevel(
    splits: list[Corrupted], method: dict[str, Any], steps: int, config: dict[str, Any]
) -> list[float]:
    """The paper's method on all splits at once: the test accuracy of the model that is best in validation.

    Of the validation rows a part is kept from F. A model is a block at a moment of the run: the one with the
    least loss on that part.
    """
    tasks = [_task(one, method, config) for one in splits]
    test = jax.tree.map(jnp.asarray, as_rows(splits[0].X_test, intercept=True))
    positive = jnp.asarray(splits[0].y_test > 0)

    def losses(problem: bx.Problem, state: bx.State) -> Array:
        held = cast(Judged, problem.upper_data).held

        def one(block: dict[str, Array], y: Array) -> Array:
            logits = products(held["row"], y) / block["temperature"]
            return jnp.mean(cross_entropy(logits, held["label"]))

        return jax.vmap(one)(problem.blocks, state.y)

    def accuracy(problem: bx.Problem, state: bx.State) -> Array:
        chosen = state.y[jnp.argmin(losses(problem, state))]
        return jnp.mean((products(test, chosen) > 0) == positive)

    found = bx.sweep(
        [task.problem for task in tasks],
        tasks[0].x0,
        tasks[0].y0,
        solver=bx.BSVRBv2,
        settings={name: [value] for name, value in method["solver"].items()},
        steps=steps,
        keys=jax.random.split(jax.random.key(0), len(tasks)),
        blocks_per_step=min(config["blocks_per_step"], method["blocks"]),
        batch_size=config["batch_size"],
        metrics={"held loss": lambda problem, state: jnp.min(losses(problem, state)), "accuracy": accuracy},
        every=max(1, steps // 50),
    )
    best = np.argmin(found.history["held loss"][0], axis=1)
    return [float(one[place]) for one, place in zip(found.history["accuracy"][0], best, strict=True)]


def _task(split: Corrupted, method: dict[str, Any], config: dict[str, Any]) -> Reweighting:
    """The paper's problem on a split, some of whose validation rows are kept for selection."""
    seen, kept = split_rows(split.y_clean, config["selection"], seed=0, stratify=True)
    heat = [1.0] if method["blocks"] == 1 else method["blocks"]
    task = reweighting(
        split.X, split.y, split.X_clean[seen], split.y_clean[seen], temperatures=heat, ridge=method["ridge"]
    )
    labels = (split.y_clean[kept] > 0).astype(np.int32)
    held = {"row": as_rows(split.X_clean[kept], intercept=True), "label": labels}
    problem = task.problem
    judged = Judged(cast(bx.Shared, problem.upper_data).rows, held)
    return dataclasses.replace(task, problem=eqx.tree_at(lambda one: one.upper_data, problem, judged))


def _paper_row(
    data: Dataset, noise: str, seeds: range, config: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    splits = [corrupt(data, noise, seed, config) for seed in seeds]
    print(f"noise {noise}: {len(splits)} seeds of logistic regression and of the bilevel methods")
    found = {PLAIN: [plain(one) for one in splits]}
    for name, method in config["methods"].items():
        found[name] = bilevel(splits, method, settings.steps or method["steps"], config)
    row: dict[str, Any] = {"noise": noise}
    for (name, accuracy), published in zip(found.items(), PAPER[noise], strict=True):
        row |= {
            name: np.array(accuracy),
            f"paper, {name}": published,
            f"gain, {name}": float(np.mean(accuracy)) - published,
        }
    return row


def _in_order(row: dict[str, Any]) -> bool:
    means = [row[name].mean() for name in (PLAIN, "m = 1", "m = 100")]
    return means[0] < means[1] < means[2]


def _user_row(
    data: Dataset, noise: str, clean: int | None, seeds: range, config: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    from sklearn.metrics import roc_auc_score

    from bilevax.applications import ReweightedClassifier

    kept: dict[str, list[float]] = {}
    for seed in seeds:
        one = corrupt(data, noise, seed, config, clean)
        with without_advice(), ThreadPoolExecutor(1) as beside:  # neither uses two cores for long
            others = beside.submit(baselines, one, seed)
            model = ReweightedClassifier(random_state=seed, **settings.fit)
            model.fit(one.X, one.y, one.X_clean, one.y_clean)
            scores, cleanlab_quality = others.result()
        scores[OURS] = float(model.score(one.X_test, one.y_test))
        scores["AUROC"] = float(roc_auc_score(~one.wrong, model.label_quality_))
        scores["AUROC, cleanlab"] = float(roc_auc_score(~one.wrong, cleanlab_quality))
        for name, value in scores.items():
            kept.setdefault(name, []).append(value)
        print(f"noise {noise}, {clean or 'all'} clean rows, seed {seed}: {OURS} {scores[OURS]:.4f}")
    columns = {name: np.array(values) for name, values in kept.items()}
    best = max(BASELINES, key=lambda name: columns[name].mean())
    row: dict[str, Any] = {"noise": noise, "clean": "all" if clean is None else clean} | columns
    return row | {"best of the others": best, "gain": columns[OURS] - columns[best]}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as text: arrays by mean and spread, gains with their sign."""
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name == "gain":
            error = value.std(ddof=1) / len(value) ** 0.5 if len(value) > 1 else np.nan
            out[name] = f"{value.mean():+.4f} ± {error:.4f}"
        elif isinstance(value, np.ndarray):
            out[name] = spread(value)
        elif name.startswith("gain"):
            out[name] = f"{value:+.4f}"
        else:
            out[name] = value
    return out


def _part(data: Dataset, rows: int | None) -> Dataset:
    if rows is None:
        return data
    return dataclasses.replace(
        data, X=data.X[:rows], y=data.y[:rows], X_test=data.X_test[:rows], y_test=data.y_test[:rows]
    )


def _plot(paper: list[dict[str, Any]], user: list[dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    noises = [row["noise"] for row in paper]
    for name in (PLAIN, "m = 1", "m = 100"):
        values = [row[name] for row in paper]
        (line, *_) = left.errorbar(
            noises, [v.mean() for v in values], [v.std() for v in values], label=name, capsize=3
        )
        left.plot(noises, [row[f"paper, {name}"] for row in paper], "--", color=line.get_color(), alpha=0.6)
    left.set(xlabel="noise", ylabel="test accuracy", title="as in the paper (dashed: its figures)")
    left.legend()
    hardest = [row for row in user if row["noise"] == user[-1]["noise"]]
    counts = [str(row["clean"]) for row in hardest]
    for name in (*BASELINES, OURS):
        values = [row[name] for row in hardest]
        right.errorbar(counts, [v.mean() for v in values], [v.std() for v in values], label=name, capsize=3)
    right.set(xlabel="clean rows", ylabel="test accuracy", title=f"noise {user[-1]['noise']}")
    right.legend()
    return figure
