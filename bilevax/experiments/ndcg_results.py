"""What is kept of every ranking method, and the table and curves that are made from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bilevax.applications.ranking import Trainings
from bilevax.experiments import figures
from bilevax.experiments.kept import Kept
from bilevax.experiments.ndcg_baselines import Baseline, judge
from bilevax.experiments.ndcg_parts import Parts
from bilevax.experiments.report import Report, spread

CUTOFFS = (10, 20, 50)
RIVAL = "lambdarank"  # the other methods are compared with it, user by user
_DIGITS = 6  # of a user's metric, as it is kept


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """R runs of a method that differ in their seeds only.

    Attributes:
      method: its name.
      settings: its hyper-parameters.
      epochs: the epochs of the measurements on development data; empty for a closed form.
      seconds: of all trainings that ran together up to each measurement, without compilation.
      dev: (R, measurements) the watched metric.
      best_epoch: (R,) the epoch that was chosen on development data.
      means: by metric, (R,) the means over users on test data.
      by_user: by metric, (users,) the means over runs on test data; NaN for users without test items.
      compile_seconds: time to trace and compile.
    """

    method: str
    settings: dict[str, Any]
    epochs: np.ndarray
    seconds: np.ndarray
    dev: np.ndarray
    best_epoch: np.ndarray
    means: dict[str, np.ndarray]
    by_user: dict[str, np.ndarray]
    compile_seconds: float = 0.0

    @staticmethod
    def of(found: Trainings, settings: Mapping[str, Any], runs: slice = slice(None)) -> MethodResult:
        """The result of trainings, or of some of their runs."""
        test = {name: column[runs] for name, column in found.test.items()}
        return MethodResult(
            found.method,
            dict(settings),
            found.epochs,
            found.seconds,
            found.dev[runs],
            found.best_epoch[runs],
            {name: np.nanmean(column, axis=1) for name, column in test.items()},
            {name: np.round(column.mean(0), _DIGITS) for name, column in test.items() if _compared(name)},
            found.compile_seconds,
        )

    @staticmethod
    def of_kept(stored: Mapping[str, Any]) -> MethodResult:
        """A result from what `Kept` stored of it."""
        columns = {name: np.asarray(stored[name], float) for name in ("epochs", "seconds", "best_epoch")}
        return MethodResult(
            stored["method"],
            stored["settings"],
            columns["epochs"],
            columns["seconds"],
            np.asarray(stored["dev"], float),
            columns["best_epoch"],
            {name: np.asarray(column, float) for name, column in stored["means"].items()},
            {name: np.asarray(column, float) for name, column in stored["by_user"].items()},
            stored["compile_seconds"],
        )


def _compared(name: str) -> bool:
    return name in (f"ndcg@{CUTOFFS[0]}", f"ndcg@{CUTOFFS[-1]}")


def keep(kept: Kept, name: str, compute: Callable[[], MethodResult]) -> MethodResult:
    """The result of that name: the one that is kept, or a new one."""
    return MethodResult.of_kept(kept.get(name, compute))


def judged(name: str, baseline: Baseline, parts: Parts, watch: str) -> MethodResult:
    """The result of a closed form."""
    found = judge(baseline, parts.train, parts.held_dev, parts.held_test, watch, cutoffs_of(parts))
    return MethodResult(
        name,
        dict(found.settings),
        np.zeros(0),
        np.zeros(0),
        np.array([[found.dev]]),
        np.zeros(0),
        {metric: np.array([np.nanmean(column)]) for metric, column in found.test.items()},
        {metric: np.round(column, _DIGITS) for metric, column in found.test.items() if _compared(metric)},
    )


def cutoffs_of(parts: Parts) -> list[int]:
    """The cutoffs that there are items for."""
    return [k for k in CUTOFFS if k <= parts.train.item_count]


def paired(one: MethodResult, other: MethodResult, metric: str) -> tuple[float, float]:
    """The mean over users of the difference of two methods, averaged over seeds; and its standard error."""
    difference = one.by_user[metric] - other.by_user[metric]
    difference = difference[np.isfinite(difference)]
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


def table_rows(found: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """The rows of a table, in this order."""
    rival = next((one for one in found if one.method == RIVAL), None)
    rows: list[dict[str, Any]] = []
    for one in found:
        cutoffs = [k for k in CUTOFFS if f"ndcg@{k}" in one.means]
        row: dict[str, Any] = {"method": one.method}
        row |= {f"NDCG@{k}": spread(one.means[f"ndcg@{k}"]) for k in cutoffs}
        row[f"recall@{cutoffs[0]}"] = spread(one.means[f"recall@{cutoffs[0]}"])
        if rival is not None and one is not rival:
            for metric in one.by_user:
                mean, error = paired(one, rival, metric)
                row[f"− {RIVAL} @{metric.partition('@')[2]}"] = f"{mean:+.4f} ± {error:.4f}"
        if len(one.epochs):
            row["best epoch"] = spread(one.best_epoch, 0)
            row["s/epoch"] = f"{one.seconds[-1] / one.epochs[-1]:.4f}"
        rows.append(row)
    return rows


def write_curves(report: Report, found: Sequence[MethodResult], watch: str) -> None:
    """Writes the metric on development data over epochs: `curves.csv` and, with matplotlib, a figure."""
    trained = [one for one in found if len(one.epochs)]
    if not trained:
        return
    report.csv(
        "curves",
        [
            {
                "method": one.method,
                "seed": seed,
                "epoch": int(e),
                "seconds": float(s),
                f"dev {watch}": float(v),
            }
            for one in trained
            for seed, line in enumerate(one.dev)
            for e, s, v in zip(one.epochs, one.seconds, line, strict=True)
        ],
    )
    try:
        figure = _plot(trained, watch)
    except ImportError:  # the curves are in curves.csv
        return
    caption = f"{watch.upper()} on development data, over epochs and over the seconds of all runs together."
    report.figure("curves", figure, figures.spread_caption(caption, len(trained[0].dev)))


@figures.styled
def _plot(trained: list[MethodResult], watch: str) -> Any:
    figure, axes = figures.panels(1, 2, height=3.4, sharey=True)
    styles = figures.styles_of([one.method for one in trained])
    for axis, against in zip(axes[0], ("epochs", "seconds"), strict=True):
        for one in trained:
            figures.curve(axis, getattr(one, against), one.dev, styles[one.method], one.method)
        axis.set_xlabel(against if against == "epochs" else "seconds, all runs together")
    axes[0][0].set_ylabel(f"development {watch.upper()}")
    figures.legend_of_all(figure)
    return figure
