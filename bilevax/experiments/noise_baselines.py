"""Baselines for noisy labels: what one would try before a bilevel method."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

BASELINES = ("noisy rows", "clean rows", "both", "CleanLearning")


@dataclasses.dataclass(frozen=True)
class NoisySplit:
    """Noisy rows, a mask of their wrong labels, clean rows, and test rows."""

    X: Any
    y: np.ndarray
    wrong: np.ndarray
    X_clean: Any
    y_clean: np.ndarray
    X_test: Any
    y_test: np.ndarray


def baselines(one: NoisySplit, seed: int) -> tuple[dict[str, float], np.ndarray]:
    """Test accuracies of the baselines, and cleanlab's quality scores of the noisy labels."""
    from cleanlab.classification import CleanLearning

    noisy, clean, test = one.X.toarray(), one.X_clean.toarray(), one.X_test.toarray()
    both = np.concatenate([noisy, clean]), np.concatenate([one.y, one.y_clean])
    # More jobs would fork this process, which is not safe with JAX.
    one_job = {"n_jobs": 1}
    learning = CleanLearning(_logistic(), seed=seed, verbose=False, find_label_issues_kwargs=one_job)
    # cleanlab cannot be told which rows are clean: it gets them together with the noisy ones.
    learning.fit(both[0], (both[1] > 0).astype(int))
    models = {
        "noisy rows": _logistic().fit(noisy, one.y),
        "clean rows": _validated(clean, one.y_clean),
        "both": _validated(*both, choices=5, most_folds=3),
    }
    issues: Any = learning.get_label_issues()
    quality = issues["label_quality"].to_numpy()[: len(one.y)]
    scores = {name: float(np.mean(model.predict(test) == one.y_test)) for name, model in models.items()}
    scores["CleanLearning"] = float(np.mean(learning.predict(test) == (one.y_test > 0)))
    return scores, quality


@contextmanager
def without_collinearity_warnings() -> Iterator[None]:
    """Hides scikit-learn's warnings about collinear columns, which one-hot features have.

    Its solver then falls back to L-BFGS, as the warning recommends. Warning filters are shared by all
    threads: enter this context before starting others.
    """
    from scipy.linalg import LinAlgWarning
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LinAlgWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _logistic(**arguments: Any) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(solver="newton-cholesky", **arguments)


def plain(one: NoisySplit) -> float:
    """The test accuracy of logistic regression on the noisy rows."""
    with without_collinearity_warnings():
        model = _logistic().fit(one.X.toarray(), one.y)
    return float(model.score(one.X_test.toarray(), one.y_test))


def _validated(X: np.ndarray, y: np.ndarray, choices: int = 7, most_folds: int = 5) -> Any:
    """Logistic regression, with C chosen from 10⁻⁴ to 10² by cross-validation of the log-loss."""
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    folds = min(most_folds, np.unique(y, return_counts=True)[1].min())
    if folds < 2:
        return _logistic(C=0.1).fit(X, y)
    search = GridSearchCV(
        _logistic(),
        {"C": np.logspace(-4, 2, choices)},
        scoring="neg_log_loss",
        cv=StratifiedKFold(int(folds), shuffle=True, random_state=0),
    )
    return search.fit(X, y)
