"""`bilevax reproduce auc`: partial AUC, average precision and multi-task AUC, beside cross-entropy.

w8a (3% positives) and a8a (24%): a split is 80% of the published training rows; the other 20% choose C of the
logistic regressions, by the measure of the column. Our classifiers run with their defaults. All are tested on
the published test rows. MNIST: see `auc_tasks`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from sklearn.preprocessing import StandardScaler

from bilevax import data
from bilevax.applications.auc import AveragePrecisionClassifier, PartialAUCClassifier
from bilevax.experiments import auc_tasks
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report, spread

VALIDATION = 0.2


@dataclasses.dataclass(frozen=True)
class AUCOptions:
    """The options of `bilevax reproduce auc`.

    Attributes:
      data: data sets of the first table.
      parts: "classifiers" and "tasks".
      seeds: splits of every data set; runs of every method on MNIST.
      seed: the first seed.
      max_fpr: of the partial AUC.
      strengths: values of C to choose from.
      steps: of our classifiers.
      rows: the most training rows; None takes all.
      tasks: those of the tasks.
      processes: fits that are made at a time, a core each.
    """

    data: tuple[str, ...] = ("w8a", "a8a")
    parts: tuple[str, ...] = ("classifiers", "tasks")
    seeds: int = 5
    seed: int = 0
    max_fpr: float = 0.1
    strengths: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
    steps: int = 2000
    rows: int | None = None
    tasks: auc_tasks.TaskOptions = dataclasses.field(default_factory=auc_tasks.TaskOptions)
    processes: int = 1

    def quick(self) -> AUCOptions:
        """A short check: one split of few rows, one run of few steps."""
        return dataclasses.replace(
            self, data=self.data[:1], seeds=1, strengths=(1.0,), steps=50, rows=2000, tasks=self.tasks.quick()
        )


def run(
    options: AUCOptions, folder: str | Path, *, quick: bool = False, resume: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Fits everything; writes a table per data set, and one of the tasks.

    Args:
      options: what to run.
      folder: where tables go, and `kept.json` with what every fit came to.
      quick: a short check.
      resume: fit only what the folder does not have; other parts, data and seeds may be asked for.

    Returns:
      The rows of the tables, by name.
    """
    options = options.quick() if quick else options
    unknown = set(options.parts) - {"classifiers", "tasks"}
    if unknown:
        raise ValueError(f"parts must be of 'classifiers' and 'tasks', got {sorted(unknown)}")
    report = Report(folder, options, quick=quick)
    free = ("data", "parts", "seeds", "processes")
    same = {name: value for name, value in dataclasses.asdict(options).items() if name not in free}
    kept = Kept(Path(folder) / "kept.json", same, resume=resume)
    seeds = range(options.seed, options.seed + options.seeds)
    names = options.data if "classifiers" in options.parts else ()
    jobs = {
        f"{name}, {title}, seed {seed}": functools.partial(fitted, name, title, options, seed)
        for name in names
        for title in reversed(classifiers(options))  # ours take longest
        for seed in seeds
    }
    if "tasks" in options.parts:
        jobs |= {
            f"tasks, {title}, seed {seed}": functools.partial(auc_tasks.fitted, title, options.tasks, seed)
            for title in auc_tasks.METHODS
            for seed in seeds
        }
    found = kept.fill(jobs, options.processes, alone=True)
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        lines = {
            title: [found[f"{name}, {title}, seed {seed}"] for seed in seeds]
            for title in classifiers(options)
        }
        tables[name] = [_row(title, fits, options) for title, fits in lines.items()]
        note = (
            "Mean ± standard deviation over splits, on the published test rows. partial AUC: the area up to "
            f"the false positive rate {options.max_fpr:g}, divided by it (scikit-learn's max_fpr rescales "
            "it: standardised). C is chosen on validation rows by the column's measure. seconds: of one fit."
        )
        report.table(f"auc_{name}", tables[name], f"Ranking the rows of {name}", note)
    if "tasks" in options.parts:
        lines = {
            title: [found[f"tasks, {title}, seed {seed}"] for seed in seeds] for title in auc_tasks.METHODS
        }
        tables["tasks"] = auc_tasks.table(lines)
        report.table("auc_tasks", tables["tasks"], "AUC of ten tasks under one network", auc_tasks.NOTE)
    report.finish()
    return tables


def partial_area(positive: np.ndarray, values: np.ndarray, max_fpr: float) -> float:
    """The area under the ROC curve up to a false positive rate, divided by that rate.

    Example:
      >>> partial_area(np.array([True, False, False]), np.array([0.5, 1.0, 0.0]), 0.5)
      0.0
    """
    false, true, _ = roc_curve(positive, values, drop_intermediate=False)
    end = np.searchsorted(false, max_fpr, "right")
    x, y = np.append(false[:end], max_fpr), np.append(true[:end], np.interp(max_fpr, false, true))
    return float(np.trapezoid(y, x) / max_fpr)


def _measures(max_fpr: float) -> dict[str, Any]:
    return {
        "partial AUC": lambda y, s: partial_area(y, s, max_fpr),
        "standardised": lambda y, s: float(roc_auc_score(y, s, max_fpr=max_fpr)),
        "AUC": lambda y, s: float(roc_auc_score(y, s)),
        "average precision": lambda y, s: float(average_precision_score(y, s)),
    }


@dataclasses.dataclass(frozen=True)
class Parts:
    """A split of a data set: rows to fit, rows to choose by, and the published test rows."""

    X: np.ndarray
    y: np.ndarray
    X_held: np.ndarray
    y_held: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


Fit = Callable[[Parts, AUCOptions, int], dict[str, tuple[float, np.ndarray]]]


def classifiers(options: AUCOptions) -> dict[str, Fit]:
    """Every method, as a function of a split: seconds and scores of the test rows, for every measure."""
    return {
        "logistic regression": functools.partial(_regression, False, None),
        "logistic regression, balanced": functools.partial(_regression, False, "balanced"),
        "logistic regression, standardised": functools.partial(_regression, True, None),
        "logistic regression, balanced, standardised": functools.partial(_regression, True, "balanced"),
        f"PartialAUCClassifier({options.max_fpr:g})": _partial,
        "AveragePrecisionClassifier()": _average_precision,
    }


def fitted(name: str, title: str, options: AUCOptions, seed: int) -> dict[str, Any]:
    """The measures of one method on the test rows of one split, and its seconds."""
    whole = data.load(name)
    X, y = whole.X[: options.rows].toarray(), whole.y[: options.rows] > 0
    train, held = data.split_rows(len(y), VALIDATION, seed=seed)
    parts = Parts(X[train], y[train], X[held], y[held], whole.X_test.toarray(), whole.y_test > 0)
    print(f"{name}, {title}, seed {seed}", flush=True)
    found = classifiers(options)[title](parts, options, seed)
    measures = _measures(options.max_fpr)
    out: dict[str, Any] = {one: measures[one](parts.y_test, scores) for one, (_, scores) in found.items()}
    return out | {"seconds": float(np.mean([seconds for seconds, _ in found.values()]))}


def _row(title: str, fits: list[dict[str, Any]], options: AUCOptions) -> dict[str, Any]:
    measured = {one: spread([fit[one] for fit in fits]) for one in _measures(options.max_fpr)}
    return {"method": title} | measured | {"seconds": f"{np.mean([fit['seconds'] for fit in fits]):.1f}"}


def _partial(parts: Parts, options: AUCOptions, seed: int) -> dict[str, tuple[float, np.ndarray]]:
    model = PartialAUCClassifier(options.max_fpr, max_iter=options.steps, random_state=seed)
    return _scored(model, parts, options)


def _average_precision(parts: Parts, options: AUCOptions, seed: int) -> dict[str, tuple[float, np.ndarray]]:
    return _scored(AveragePrecisionClassifier(max_iter=options.steps, random_state=seed), parts, options)


def _scored(model: Any, parts: Parts, options: AUCOptions) -> dict[str, tuple[float, np.ndarray]]:
    """One model for all measures."""
    began = time.perf_counter()
    model.fit(parts.X, parts.y)
    seconds, scores = time.perf_counter() - began, model.decision_function(parts.X_test)
    return dict.fromkeys(_measures(options.max_fpr), (seconds, scores))


def _regression(
    scaled: bool, weight: str | None, parts: Parts, options: AUCOptions, seed: int
) -> dict[str, tuple[float, np.ndarray]]:
    """A logistic regression for every measure: that whose C does best on the rows to choose by."""
    scaler = StandardScaler().fit(parts.X)
    X, X_held, X_test = (
        scaler.transform(one) if scaled else one for one in (parts.X, parts.X_held, parts.X_test)
    )
    trials: list[tuple[float, np.ndarray, np.ndarray]] = []
    for strength in options.strengths:
        began = time.perf_counter()
        model = LogisticRegression(C=strength, class_weight=weight, max_iter=300)
        with warnings.catch_warnings():  # the largest C need not converge to be judged
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(X, parts.y)
        held, test = (np.asarray(model.decision_function(one)) for one in (X_held, X_test))
        trials.append((time.perf_counter() - began, held, test))
    out = {}
    for measure, function in _measures(options.max_fpr).items():
        best = max(trials, key=lambda trial, function=function: function(parts.y_held, trial[1]))
        out[measure] = best[0], best[2]
    return out


def main(words: list[str] | None = None) -> None:
    """`python -m bilevax.experiments.auc`: `bilevax reproduce auc` without the extra `cli`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", nargs="*", default=AUCOptions.data)
    parser.add_argument("--parts", nargs="*", default=AUCOptions.parts)
    for name in ("seeds", "seed", "processes"):
        parser.add_argument(f"--{name}", type=int, default=getattr(AUCOptions, name))
    parser.add_argument("--out", default="results/auc")
    parser.add_argument("--resume", action="store_true", help="fit only what is missing in the folder")
    parser.add_argument("--quick", action="store_true", help="a short check")
    given = parser.parse_args(words)
    numbers = {name: getattr(given, name) for name in ("seeds", "seed", "processes")}
    options = AUCOptions(tuple(given.data), tuple(given.parts), **numbers)
    run(options, given.out, quick=given.quick, resume=given.resume)


if __name__ == "__main__":
    main()
