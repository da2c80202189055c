"""Noisy labels: 100 classifiers learn together which training rows to trust. `make demo` runs it.

Is a handwritten digit at least 5? There are many training rows, but 40% of their labels are flipped; 60 rows
are known to be clean. The upper variable x holds a weight for each training row, which all blocks share.
Block i is a logistic regression on the weighted rows, at temperature T_i, judged by its loss on clean rows:

    min_x 1/m Σ_i mean over clean rows of loss(y_i(x)/T_i)
    y_i(x) = argmin_y mean over noisy rows of sigmoid(x) · loss(y/T_i), + ridge/2 ‖y‖²

A temperature T amounts to a strength of regularisation, ridge · T²: with many, none has to be chosen. The
hyper-parameters below were tuned on the splits 100 to 119; the demo uses other splits.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import bilevax as bx
from bilevax.experiments import figures
from bilevax.experiments.report import Report

BLOCKS, COMPONENTS, CLEAN_ROWS, FLIPPED = 100, 20, 60, 0.4
TEMPERATURES = np.linspace(1, 11, BLOCKS, endpoint=False)
RIDGE = 0.01
CLEAN = "logistic regression, clean rows"
SOLVERS = {"BSVRBv1": bx.BSVRBv1(upper_step=30.0), "BSVRBv2": bx.BSVRBv2(upper_step=30.0)}


class Labelled(NamedTuple):
    """Rows with labels ±1; the last column of the rows is the constant 1."""

    row: np.ndarray
    label: np.ndarray


class DigitsSplit(NamedTuple):
    """A split of the digits; `flipped` is a mask of the wrong labels of `noisy`."""

    noisy: Labelled
    clean: Labelled
    test: Labelled
    flipped: np.ndarray


class Score(NamedTuple):
    """The test accuracy of a classifier on a split, and the seconds of its fit."""

    name: str
    accuracy: float
    seconds: float


def load_split(seed: int) -> DigitsSplit:
    """A stratified split of the digits, as principal components: 30% test, 60 clean, and noisy rows."""
    pixels, digits = load_digits(return_X_y=True)
    rest, test = train_test_split(np.arange(len(digits)), test_size=0.3, stratify=digits, random_state=seed)
    noisy, clean = train_test_split(rest, test_size=CLEAN_ROWS, stratify=digits[rest], random_state=seed)
    scale = make_pipeline(PCA(COMPONENTS, random_state=0), StandardScaler()).fit(pixels[noisy])

    def rows(index: Any) -> Labelled:
        columns = np.c_[scale.transform(pixels[index]), np.ones(len(index))]
        return Labelled(columns.astype(np.float32), np.where(digits[index] >= 5, 1, -1).astype(np.float32))

    flipped = np.random.default_rng(seed).random(len(noisy)) < FLIPPED
    true = rows(noisy)
    given = Labelled(true.row, np.where(flipped, -true.label, true.label))
    return DigitsSplit(given, rows(clean), rows(test), flipped)


def loss(y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """The logistic loss of each row of a batch, at a block's temperature."""
    return jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block["temperature"])


def upper(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """f_i: the loss on clean rows."""
    return jnp.mean(loss(y, block, batch))


def lower(x: Array, y: Array, block: dict[str, Array], batch: dict[str, Array]) -> Array:
    """g_i: the weighted loss on noisy rows, with a ridge penalty."""
    return jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * loss(y, block, batch)) + RIDGE / 2 * y @ y


def make_problem(split: DigitsSplit) -> bx.Problem:
    """The bilevel problem of a split."""
    return bx.Problem(
        upper=upper,
        lower=lower,
        blocks={"temperature": TEMPERATURES.astype(np.float32)},
        upper_data=bx.Shared(split.clean._asdict()),
        lower_data=bx.Shared(split.noisy._asdict() | {"index": np.arange(len(split.flipped))}),
    )


def logits(rows: Labelled, y: Array) -> np.ndarray:
    """The logit of every row in every block."""
    return rows.row @ np.asarray(y).T / TEMPERATURES


def clean_losses(split: DigitsSplit, y: Array) -> np.ndarray:
    """The loss of every block on all clean rows."""
    return np.logaddexp(0, -split.clean.label[:, None] * logits(split.clean, y)).mean(0)


def learn(solver: bx.AbstractSolver, split: DigitsSplit, seed: int, steps: int) -> bx.Result:
    """Learns the weights with a solver; shows a progress bar."""
    return bx.minimize(
        make_problem(split),
        jnp.zeros(len(split.flipped)),
        jnp.zeros((BLOCKS, COMPONENTS + 1)),
        solver=solver,
        steps=steps,
        key=jax.random.key(seed),
        blocks_per_step=10,
        batch_size=32,
        metrics={"clean loss": lambda problem, state: clean_losses(split, state.y).mean()},
        stop=bx.Stop(raise_on_interrupt=True),
    )


def weights(result: bx.Result) -> np.ndarray:
    """The learnt weight of every noisy row, in (0, 1)."""
    return np.asarray(jax.nn.sigmoid(result.x))


def scores(name: str, result: bx.Result, split: DigitsSplit) -> list[Score]:
    """The blocks as a classifier: their mean, and the block with the smallest loss on the clean rows."""
    seconds = float(result.history["seconds"][-1])
    of_blocks, best = logits(split.test, result.y), np.argmin(clean_losses(split, result.y))
    choices = {"mean of blocks": of_blocks.mean(1), "best block": of_blocks[:, best]}
    right = {which: (one > 0) == (split.test.label > 0) for which, one in choices.items()}
    return [Score(f"{name}, {which}", float(one.mean()), seconds) for which, one in right.items()]


def logistic_regression(name: str, training: Labelled, test: Labelled) -> Score:
    """scikit-learn's logistic regression, with C chosen by 5-fold cross-validation of the log-loss."""
    began = time.perf_counter()
    grid = {"C": np.logspace(-4, 2, 7)}
    search = GridSearchCV(LogisticRegression(solver="newton-cholesky"), grid, scoring="neg_log_loss", cv=5)
    search.fit(training.row[:, :-1], training.label)
    accuracy = np.mean(search.predict(test.row[:, :-1]) == test.label)
    return Score(name, float(accuracy), time.perf_counter() - began)


def baselines(split: DigitsSplit) -> list[Score]:
    """Logistic regressions on all rows, on the clean rows, and, as a bound, on all rows with true labels."""
    everything = Labelled(*(np.concatenate(pair) for pair in zip(split.noisy, split.clean, strict=True)))
    flips = np.r_[split.flipped, np.zeros(CLEAN_ROWS, bool)]
    true = Labelled(everything.row, np.where(flips, -everything.label, everything.label))
    return [
        logistic_regression("logistic regression, all rows", everything, split.test),
        logistic_regression(CLEAN, split.clean, split.test),
        logistic_regression("logistic regression, true labels", true, split.test),
    ]


def table(found: list[list[Score]]) -> list[dict[str, str]]:
    """Rows of means over the splits: accuracy, gain over the clean rows alone ± its error, and seconds."""
    accuracy = np.array([[score.accuracy for score in of_split] for of_split in found])
    names = [score.name for score in found[0]]
    gain = accuracy - accuracy[:, [names.index(CLEAN)]]
    error = stats.sem(gain) if len(found) > 1 else np.full(len(names), np.nan)
    seconds = np.mean([[score.seconds for score in of_split] for of_split in found], axis=0)
    rows = []
    for name, a, g, e, s in zip(names, accuracy.mean(0), gain.mean(0), error, seconds, strict=True):
        more = f"{g:+.3f} ± {e:.3f}" if len(found) > 1 else f"{g:+.3f}"
        row = {"model": name, "test accuracy": f"{a:.3f}", "gain": "" if name == CLEAN else more}
        rows.append(row | {"seconds": f"{s:.2f}"})
    return rows


@figures.styled
def plot(results: dict[str, bx.Result], flipped: np.ndarray) -> Any:
    """The figure: the loss on the clean rows over time, and weights of rows with flipped and right labels."""
    figure, ((left, right),) = figures.panels(1, 2)
    for name, style in figures.styles_of(list(results)).items():
        seen = results[name].history
        figures.curve(left, seen["seconds"], seen["clean loss"], style, name)
    left.set(xlabel="seconds, without compilation", ylabel="mean loss on the clean rows", xscale="log")
    figures.legend_below(left)
    name, result = list(results.items())[-1]
    shown = {"label flipped": flipped, "label right": ~flipped}
    for (label, which), style in zip(shown.items(), figures.shades(2), strict=True):
        right.hist(weights(result)[which], bins=40, range=(0, 1), alpha=0.6, color=style.colour, label=label)
    right.set(xlabel="learnt weight of a training row", ylabel="rows", title=name)
    figures.legend_below(right)
    return figure


@bx.program_cache()
def main(arguments: list[str] | None = None) -> None:
    """Runs solvers and baselines on every split; writes a table and a plot, and prints the table."""
    parser = argparse.ArgumentParser(
        "python -m bilevax.experiments.demo", description="Learning from noisy labels."
    )
    parser.add_argument("--seed", type=int, default=0, help="the first split")
    parser.add_argument("--splits", type=int, default=10, help="number of splits to average over")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each solver")
    parser.add_argument("--out", type=Path, default=Path("results/demo/demo.png"), help="file of the plot")
    options = parser.parse_args(arguments)
    if options.out.is_dir():
        raise ValueError(f"out must be the file of the plot, got the folder {options.out}")
    # If its folder cannot be made, it fails before any work is done.
    report = Report(options.out.parent, {name: one for name, one in vars(options).items() if name != "out"})
    console = Console()
    began = time.perf_counter()

    found, ranking, first = [], {name: [] for name in SOLVERS}, {}
    for seed in range(options.seed, options.seed + options.splits):
        split = load_split(seed)
        found.append([])
        for name, solver in SOLVERS.items():
            console.print(f"split {seed}, {name}")
            result = learn(solver, split, seed, options.steps)
            found[-1] += scores(name, result, split)
            ranking[name].append(roc_auc_score(~split.flipped, weights(result)))
            first.setdefault(name, result)
        found[-1] += baselines(split)

    areas = {name: f"{np.mean(values):.3f}" for name, values in ranking.items()}
    report.fact("AUROC of the weights", areas)
    note = (
        f"{FLIPPED:.0%} of the noisy labels flipped. gain: over '{CLEAN}', ± its standard error. AUROC of "
        f"the weights, right labels against flipped ones: {', '.join(map(' '.join, areas.items()))}."
    )
    report.table("demo", table(found), f"Means over {len(found)} splits", note)
    compiled = ", ".join(f"{name} {result.compile_seconds:.1f}" for name, result in first.items())
    console.print(f"seconds to compile, once: {compiled}; total {time.perf_counter() - began:.0f} s")
    caption = (
        "(a) Mean loss on the clean rows over seconds, and (b) learnt weights of the training rows; the "
        f"first of {options.splits} splits."
    )
    figure = plot(first, load_split(options.seed).flipped)
    report.figure(options.out.stem, figure, figures.spread_caption(caption, 1))
    console.print(f"plot: {options.out}")
    report.finish()


if __name__ == "__main__":
    main()
