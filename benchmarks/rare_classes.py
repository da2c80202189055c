"""Average precision on w8a, where 3% of the rows are positive, with noisy labels and few clean rows.

`python -m benchmarks.rare_classes` tabulates, by noise level and number of clean rows, the average precision
on w8a's test rows of logistic regression on the noisy rows, on the clean rows and on both, and of
`ReweightedClassifier`; mean ± standard deviation over seeds, and the paired gain over the noisy rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse, stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from bilevax.applications import ReweightedClassifier
from bilevax.data import Dataset, flip_labels, load
from bilevax.experiments.report import Report, command_line, spread

OURS = "ReweightedClassifier"


def split(
    data: Dataset, noise: float, clean: int, seed: int, rows: int | None = None
) -> tuple[Any, np.ndarray, Any, np.ndarray]:
    """Noisy rows with flipped labels, and clean rows, with at least one of each class."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(data.y))
    while len(np.unique(data.y[order[:clean]])) < 2:
        order = random.permutation(len(data.y))
    trusted, rest = order[:clean], order[clean:][:rows]
    noisy, _ = flip_labels(data.y[rest], noise, seed=seed)
    return data.X[rest], noisy, data.X[trusted], data.y[trusted]


def scores(data: Dataset, noise: float, clean: int, seed: int, rows: int | None) -> dict[str, float]:
    """The average precision of every method on one split."""
    X, y, X_clean, y_clean = split(data, noise, clean, seed, rows)
    both = sparse.vstack([X, X_clean]), np.concatenate([y, y_clean])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = {
            "noisy rows": LogisticRegression(max_iter=1000).fit(X, y),
            "clean rows": LogisticRegression(max_iter=1000).fit(X_clean, y_clean),
            "both": LogisticRegression(max_iter=1000).fit(*both),
        }
    models[OURS] = ReweightedClassifier(random_state=seed).fit(X, y, X_clean, y_clean)
    return {
        name: float(average_precision_score(data.y_test > 0, model.decision_function(data.X_test)))
        for name, model in models.items()
    }


def main() -> None:
    """Prints a line for every split, and writes a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.rare_classes", description=__doc__)
    parser.add_argument("--data", default="w8a")
    parser.add_argument("--noises", type=float, nargs="*", default=[0.1, 0.2, 0.3])
    parser.add_argument("--clean", type=int, nargs="*", default=[100])
    parser.add_argument("--rows", type=int, default=10_000, help="noisy rows; 0 for all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/rare_classes"))
    options = parser.parse_args()
    report = Report(options.out, command_line(options))
    data = load(options.data)
    rows, below = [], []
    for noise in options.noises:
        for clean in options.clean:
            found: dict[str, list[float]] = {}
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                began = time.perf_counter()
                for name, value in scores(data, noise, clean, seed, options.rows or None).items():
                    found.setdefault(name, []).append(value)
                line = "  ".join(f"{name} {values[-1]:.4f}" for name, values in found.items())
                print(f"noise {noise}, {clean} clean rows, seed {seed}: {line}", flush=True)
                print(f"  {time.perf_counter() - began:.1f} s", flush=True)
            gain = np.array(found[OURS]) - np.array(found["noisy rows"])
            below += [f"{one:+.3f}" for one in gain if one < 0]
            error = stats.sem(gain) if len(gain) > 1 else np.nan
            row: dict[str, Any] = {"noise": noise, "clean": clean}
            row |= {name: spread(values) for name, values in found.items()}
            rows.append(row | {"gain": f"{gain.mean():+.4f} ± {error:.4f}"})
    note = (
        "Average precision on test rows, mean ± standard deviation over seeds; gain: over the noisy rows, "
        f"± its standard error. Fits below the noisy rows: {len(below)} ({', '.join(below)})."
    )
    report.table("rare_classes", rows, f"Rare classes: {options.data}", note)
    report.finish()


if __name__ == "__main__":
    main()
