"""`bilevax reproduce noise`: test accuracy under noisy labels, compared with the paper and with baselines.

Of a8a, 80% of the rows are for training and 20%, which stay clean, for validation. 70% of the positive
training rows are removed, and a share of the training labels is flipped; noise 0* does neither. The test rows
are those of a8a.t. There are two tables:

- the paper's: logistic regression on the noisy rows, and the bilevel problem with m = 1 and m = 100
  temperatures. Some validation rows are held out of F, and the model with the smallest loss on them is used;
- the user's: all or a few of the validation rows are known to be clean. Compared are fits on the noisy rows,
  on the clean rows, on both, cleanlab's `CleanLearning`, and `ReweightedClassifier`; and how well the last
  two find flipped labels.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

import bilevax as bx
from bilevax.applications.reweighting import Reweighting, as_rows, cross_entropy, products, reweighting
from bilevax.data import Dataset, flip_labels, load, remove_positives, split_rows
from bilevax.experiments import figures
from bilevax.experiments.kept import Kept, Task
from bilevax.experiments.noise_baselines import (
    BASELINES,
    NoisySplit,
    baselines,
    plain,
    without_collinearity_warnings,
)
from bilevax.experiments.report import Report, spread

CONFIG = Path(__file__).parent / "configs" / "noise.json"
PAPER = {  # the paper's accuracies of logistic regression, m = 1 and m = 100
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
class NoiseOptions:
    """The options of `bilevax reproduce noise`.

    Attributes:
      seeds: number of splits, each with its own corruptions.
      first_seed: the first seed; the hyper-parameters were tuned on seeds from 100.
      noises: noise levels of the paper's table.
      user_noises: noise levels of the second table.
      clean: numbers of clean rows; None means all validation rows.
      steps: steps of the bilevel runs of the paper's table; None uses the configuration's.
      rows: number of training and of test rows to use; None uses all.
      fit: arguments of `ReweightedClassifier` that differ from its defaults.
    """

    seeds: int = 5
    first_seed: int = 0
    noises: tuple[str, ...] = tuple(PAPER)
    user_noises: tuple[str, ...] = ("0.2", "0.3", "0.4")
    clean: tuple[int | None, ...] = (50, 200, 1000, None)
    steps: int | None = None
    rows: int | None = None
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def all_seeds(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def quick(self) -> NoiseOptions:
        """A short check: one noise level, few seeds, steps and rows."""
        return dataclasses.replace(
            self,
            seeds=2,
            noises=("0.4",),
            user_noises=("0.4",),
            clean=(50, None),
            steps=300,
            rows=3000,
            fit={"max_iter": 300, "rounds": 1},
        )


def run(
    options: NoiseOptions,
    folder: str | Path,
    *,
    quick: bool = False,
    resume: bool = False,
    processes: int = 1,
) -> dict[str, list[dict[str, Any]]]:
    """Fits everything; writes two tables and a plot to a folder.

    Every result is kept in `kept.json` as it comes; `resume` computes only what is missing there.

    Returns:
      The rows of the tables "paper" and "user", with one entry per seed.
    """
    options = options.quick() if quick else options
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    report = Report(folder, options, quick=quick)
    report.fact("configuration", config)
    kept = Kept(report.folder / "kept.json", {"options": options, "configuration": config}, resume=resume)
    found = kept.fill(_tasks(options, config), processes, alone=True)
    paper = [_paper_row(noise, found[_of_paper(noise)]) for noise in options.noises]
    order = ", ".join(noise for noise, row in zip(options.noises, paper, strict=True) if _in_order(row))
    report.table(
        "noise",
        [_shown(row) for row in paper],
        "Test accuracy under noisy labels, compared with the paper",
        "mean ± standard deviation over seeds; m = 1 and m = 100: BSVRB v2, with even temperatures; paper: "
        "as published, v1 with random ones (--protocol paper); gain: our mean minus the paper's. "
        f"Noise levels at which logistic regression < m = 1 < m = 100 in the mean: {order or 'none'}.",
    )
    user = [
        _user_row(noise, clean, [found[_of_user(noise, clean, seed)] for seed in options.all_seeds])
        for noise in options.user_noises
        for clean in options.clean
    ]
    report.table(
        "noise_clean_rows",
        [_shown(row) for row in user],
        "Test accuracy with a few clean rows",
        "mean ± standard deviation over seeds; gain: ReweightedClassifier minus the baseline with the best "
        "mean, ± the standard error of the difference; AUROC: of finding wrong labels, by label_quality_ and "
        "by cleanlab.",
    )
    gains = np.mean([row["gain"].mean() for row in user])
    report.fact("mean gain over the best baseline", float(gains))
    caption = (
        "Test accuracy (a) by noise level, with the paper's figures as dashes, and (b) by the number of "
        f"clean rows at noise {user[-1]['noise']}."
    )
    report.figure("noise", _plot(paper, user), figures.spread_caption(caption, options.seeds))
    report.finish()
    return {"paper": paper, "user": user}


def _tasks(options: NoiseOptions, config: dict[str, Any]) -> dict[str, Task]:
    """What computes every result, by name; the longest first."""
    tasks: dict[str, Task] = {
        _of_paper(noise): functools.partial(_accuracies, noise, config, options) for noise in options.noises
    }
    for noise in options.user_noises:
        for clean in options.clean:
            for seed in options.all_seeds:
                tasks[_of_user(noise, clean, seed)] = functools.partial(
                    _scores, noise, clean, seed, config, options
                )
    return tasks


def _of_paper(noise: str) -> str:
    return f"noise {noise}"


def _of_user(noise: str, clean: int | None, seed: int) -> str:
    return f"noise {noise}, {clean or 'all'} clean rows, seed {seed}"


def corrupt(
    data: Dataset, noise: str, seed: int, config: dict[str, Any], clean: int | None = None
) -> NoisySplit:
    """A split with its corruptions; `clean` is the number of validation rows to keep, drawn at random."""
    train, validation = split_rows(data.y, config["validation"], seed=seed, stratify=True)
    if noise != "0*":
        train = train[remove_positives(data.y[train], config["removed"], seed=seed)]
    y, wrong = flip_labels(data.y[train], 0.0 if noise == "0*" else float(noise), seed=seed)
    if clean is not None:
        random = np.random.default_rng(seed)
        validation = random.permutation(validation)
        while len(np.unique(data.y[validation[:clean]])) < 2:  # fits need both classes
            validation = random.permutation(validation)
        validation = validation[:clean]
    return NoisySplit(
        data.X[train], y, wrong, data.X[validation], data.y[validation], data.X_test, data.y_test
    )


class WithHeldOut(bx.Shared):
    """The rows of F, and held-out rows that select a model: its loss on the rows of F would be too low."""

    held: dict[str, Any]

    def __init__(self, rows: Any, held: Any):
        super().__init__(rows)
        self.held = jax.tree.map(jnp.asarray, held)


def bilevel(
    splits: list[NoisySplit], method: dict[str, Any], steps: int, config: dict[str, Any]
) -> list[float]:
    """The test accuracies of the paper's method on all splits at once.

    The model is one block at one step: those with the smallest loss on the held-out validation rows.
    """
    tasks = [_task(one, method, config) for one in splits]
    test = jax.tree.map(jnp.asarray, as_rows(splits[0].X_test, intercept=True))
    positive = jnp.asarray(splits[0].y_test > 0)

    def losses(problem: bx.Problem, state: bx.State) -> Array:
        held = cast(WithHeldOut, problem.upper_data).held

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


def _task(split: NoisySplit, method: dict[str, Any], config: dict[str, Any]) -> Reweighting:
    """The paper's problem on a split, with some validation rows held out for selection."""
    seen, kept = split_rows(split.y_clean, config["selection"], seed=0, stratify=True)
    heat = [1.0] if method["blocks"] == 1 else method["blocks"]
    task = reweighting(
        split.X, split.y, split.X_clean[seen], split.y_clean[seen], temperatures=heat, ridge=method["ridge"]
    )
    labels = (split.y_clean[kept] > 0).astype(np.int32)
    held = {"row": as_rows(split.X_clean[kept], intercept=True), "label": labels}
    problem = task.problem
    rows = WithHeldOut(cast(bx.Shared, problem.upper_data).rows, held)
    return dataclasses.replace(task, problem=eqx.tree_at(lambda one: one.upper_data, problem, rows))


def _accuracies(noise: str, config: dict[str, Any], options: NoiseOptions) -> dict[str, list[float]]:
    """Of the paper's methods at a noise level, over seeds."""
    data = part_of(load(config["data"]), options.rows)
    splits = [corrupt(data, noise, seed, config) for seed in options.all_seeds]
    print(f"noise {noise}: {len(splits)} seeds of logistic regression and of the bilevel methods")
    found = {PLAIN: [float(plain(one)) for one in splits]}
    for name, method in config["methods"].items():
        found[name] = bilevel(splits, method, options.steps or method["steps"], config)
    return found


def _paper_row(noise: str, found: dict[str, list[float]]) -> dict[str, Any]:
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


def _scores(
    noise: str, clean: int | None, seed: int, config: dict[str, Any], options: NoiseOptions
) -> dict[str, float]:
    """The test accuracies of one split with a few clean rows, and how well wrong labels are found."""
    from sklearn.metrics import roc_auc_score

    from bilevax.applications import ReweightedClassifier

    one = corrupt(part_of(load(config["data"]), options.rows), noise, seed, config, clean)
    with without_collinearity_warnings():
        scores, cleanlab_quality = baselines(one, seed)
        model = ReweightedClassifier(random_state=seed, **options.fit)
        model.fit(one.X, one.y, one.X_clean, one.y_clean)
    scores[OURS] = float(model.score(one.X_test, one.y_test))
    scores["AUROC"] = float(roc_auc_score(~one.wrong, model.label_quality_))
    scores["AUROC, cleanlab"] = float(roc_auc_score(~one.wrong, cleanlab_quality))
    print(f"{_of_user(noise, clean, seed)}: {OURS} {scores[OURS]:.4f}")
    return {name: float(value) for name, value in scores.items()}


def _user_row(noise: str, clean: int | None, found: list[dict[str, float]]) -> dict[str, Any]:
    columns = {name: np.array([one[name] for one in found]) for name in found[0]}
    best = max(BASELINES, key=lambda name: columns[name].mean())
    row: dict[str, Any] = {"noise": noise, "clean": "all" if clean is None else clean} | columns
    return row | {"best baseline": best, "gain": columns[OURS] - columns[best]}


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row as text: arrays as mean ± standard deviation, gains with a sign."""
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name == "gain":
            error = stats.sem(value) if len(value) > 1 else np.nan
            out[name] = f"{value.mean():+.4f} ± {error:.4f}"
        elif isinstance(value, np.ndarray):
            out[name] = spread(value)
        elif name.startswith("gain"):
            out[name] = f"{value:+.4f}"
        else:
            out[name] = value
    return out


def part_of(data: Dataset, rows: int | None) -> Dataset:
    """The data with their first training and test rows only; None keeps all."""
    if rows is None:
        return data
    return dataclasses.replace(
        data, X=data.X[:rows], y=data.y[:rows], X_test=data.X_test[:rows], y_test=data.y_test[:rows]
    )


@figures.styled
def _plot(paper: list[dict[str, Any]], user: list[dict[str, Any]]) -> Any:
    figure, ((left, right),) = figures.panels(1, 2)
    names = (PLAIN, "m = 1", "m = 100")
    series = {name: [row[name] for row in paper] for name in names}
    places = figures.bars(left, [row["noise"] for row in paper], series, figures.styles_of(names))
    for name in names:
        published = [row[f"paper, {name}"] for row in paper]
        left.plot(places[name], published, "k_", markersize=6, label="the paper" if name == PLAIN else None)
    lowest = min([min(values.min() for values in runs) for runs in series.values()])
    left.set(xlabel="noise", ylabel="test accuracy", ylim=(np.floor(20 * lowest) / 20, None))
    figures.legend_below(left)
    hardest = [row for row in user if row["noise"] == user[-1]["noise"]]
    counts = [str(row["clean"]) for row in hardest]
    for place, (name, style) in enumerate(figures.styles_of((*BASELINES, OURS)).items()):
        values = [row[name] for row in hardest]
        at = np.arange(len(counts)) + 0.06 * (place - 2)
        sd = [float(figures.deviation(v)) for v in values]
        right.errorbar(
            at, [v.mean() for v in values], sd, color=style.colour, marker=style.marker, label=name, capsize=2
        )
    right.set_xticks(range(len(counts)), counts)
    right.set(xlabel="clean rows", ylabel="test accuracy", title=f"noise {user[-1]['noise']}")
    figures.legend_below(right)
    return figure
