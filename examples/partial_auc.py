"""Few false alarms are allowed: a score for the left end of the ROC curve, beside a logistic regression.

python examples/partial_auc.py [--quick]
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bilevax.applications.auc import PartialAUCClassifier

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def alarms(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """2% frauds; half of the other rows look like frauds in a feature that says nothing about the rest."""
    random = np.random.default_rng(seed)
    fraud = random.random(rows) < 0.02
    busy = random.random(rows) < 0.5
    X = random.normal(size=(rows, 10))
    X[:, 0] += np.where(fraud, 1.5, np.where(busy, 0.0, -4.0))  # tells frauds from rows that nobody confuses
    X[:, 1] += 1.5 * fraud
    X[:, 2] += np.where(busy & ~fraud, 1.0, 0.0)
    return X, fraud


def main() -> None:
    """Fits both, prints the areas, and draws the curves."""
    quick = "--quick" in sys.argv
    X, y = alarms(2_000 if quick else 20_000, seed=0)
    X_test, y_test = alarms(20_000, seed=1)
    models = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced")),
        "partial AUC": PartialAUCClassifier(0.05, max_iter=100 if quick else 2_000, random_state=0),
    }
    figure, axes = plt.subplots(figsize=(5, 4))
    for name, model in models.items():
        scores = model.fit(X, y).decision_function(X_test)
        area = roc_auc_score(y_test, scores, max_fpr=0.05)
        print(f"{name:20} partial AUC (0.05): {area:.4f}   AUC: {roc_auc_score(y_test, scores):.4f}")
        false, true, _ = roc_curve(y_test, scores)
        axes.plot(false, true, label=f"{name}, {area:.3f}")
    axes.set(xlim=(0, 0.1), ylim=(0, 1), xlabel="false positive rate", ylabel="true positive rate")
    axes.axvline(0.05, color="gray", linewidth=0.5)
    axes.legend(loc="lower right")
    figure.savefig("partial_auc.png", dpi=130)
    print("drawn to partial_auc.png")


if __name__ == "__main__":
    main()
