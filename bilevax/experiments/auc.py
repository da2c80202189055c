"""`bilevax reproduce auc`: partial AUC, average precision and multi-task AUC, beside cross-entropy.

w8a (3% positives) and a8a (24%): a split is 80% of the published training rows; the other 20% choose C of the
logistic regressions, by the measure of the column. Our classifiers run with their defaults. All are tested on
the published test rows. MNIST: see `auc_tasks`.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
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

    def quick(self) -> AUCOptions:
        """A short check: one split of few rows, one run of few steps."""
        return dataclasses.replace(
            self, data=self.data[:1], seeds=1, strengths=(1.0,), steps=50, rows=2000, tasks=self.tasks.quick()
        )


def run(options: AUCOptions, folder: str | Path, *, quick: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Fits everything; writes a table per data set, and one of the tasks.

    Returns:
      The rows of the tables, by name.
    """
    options = options.quick() if quick else options
    unknown = set(options.parts) - {"classifiers", "tasks"}
    if unknown:
        raise ValueError(f"parts must be of 'classifiers' and 'tasks', got {sorted(unknown)}")
    report = Report(folder, options, quick=quick)
    seeds = range(options.seed, options.seed + options.seeds)
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in options.data if "classifiers" in options.parts else ():
        tables[name] = _compared(name, options, seeds)
        note = (
            "Mean ± standard deviation over splits, on the published test rows. partial AUC: the area up to "
            f"the false positive rate {options.max_fpr:g}, divided by it (scikit-learn's max_fpr rescales "
            "it: standardised). C is chosen on validation rows by the column's measure. seconds: of one fit."
        )
        report.table(f"auc_{name}", tables[name], f"Ranking the rows of {name}", note)
    if "tasks" in options.parts:
        tables["tasks"] = auc_tasks.compared(options.tasks, seeds)
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


def _compared(name: str, options: AUCOptions, seeds: range) -> list[dict[str, Any]]:
    """Every method's measures on the test rows."""
    whole = data.load(name)
    X, y = whole.X[: options.rows].toarray(), whole.y[: options.rows] > 0
    X_test, y_test = whole.X_test.toarray(), whole.y_test > 0
    measures = _measures(options.max_fpr)
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        train, held = data.split_rows(len(y), VALIDATION, seed=seed)
        ours = {
            f"PartialAUCClassifier({options.max_fpr:g})": PartialAUCClassifier(
                options.max_fpr, max_iter=options.steps, random_state=seed
            ),
            "AveragePrecisionClassifier()": AveragePrecisionClassifier(
                max_iter=options.steps, random_state=seed
            ),
        }
        for title, values in _regressions(X[train], y[train], X[held], y[held], X_test, options).items():
            line = found.setdefault(title, {})
            for measure, (seconds, scores) in values.items():
                line.setdefault(measure, []).append(measures[measure](y_test, scores))
                line.setdefault("seconds", []).append(seconds)
        for title, model in ours.items():
            print(f"{name}, {title}, seed {seed}")
            began = time.perf_counter()
            model.fit(X[train], y[train])
            line = found.setdefault(title, {})
            line.setdefault("seconds", []).append(time.perf_counter() - began)
            scores = model.decision_function(X_test)
            for measure, function in measures.items():
                line.setdefault(measure, []).append(function(y_test, scores))
    return [
        {"method": title}
        | {measure: spread(line[measure]) for measure in measures}
        | {"seconds": f"{np.mean(line['seconds']):.1f}"}
        for title, line in found.items()
    ]


def _regressions(
    X: np.ndarray,
    y: np.ndarray,
    X_held: np.ndarray,
    y_held: np.ndarray,
    X_test: np.ndarray,
    options: AUCOptions,
) -> dict[str, dict[str, tuple[float, np.ndarray]]]:
    """For every kind of logistic regression and every measure: seconds, and the scores of the test rows."""
    out: dict[str, dict[str, tuple[float, np.ndarray]]] = {}
    scaler = StandardScaler().fit(X)
    for scaled in (False, True):
        parts = [scaler.transform(one) if scaled else one for one in (X, X_held, X_test)]
        for weight in (None, "balanced"):
            title = f"logistic regression{', balanced' * (weight is not None)}{', standardised' * scaled}"
            trials: list[tuple[float, np.ndarray, np.ndarray]] = []
            for strength in options.strengths:
                began = time.perf_counter()
                model = LogisticRegression(C=strength, class_weight=weight, max_iter=300)
                with warnings.catch_warnings():  # the largest C need not converge to be judged
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    model.fit(parts[0], y)
                held, test = (np.asarray(model.decision_function(one)) for one in parts[1:])
                trials.append((time.perf_counter() - began, held, test))
            out[title] = {}
            for measure, function in _measures(options.max_fpr).items():
                best = max(trials, key=lambda trial, function=function: function(y_held, trial[1]))
                out[title][measure] = best[0], best[2]
    return out
