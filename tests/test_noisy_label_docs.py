"""docs/noisy_labels.md: its examples run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import sklearn
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

TEXT = Path(__file__).parents[1].joinpath("docs", "noisy_labels.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """Features of very different scales: nothing works that does not scale the clean rows too."""
    X, y = load_breast_cancer(return_X_y=True)
    random = np.random.default_rng(0)
    order = random.permutation(len(y))
    X, y = X[order], y[order]
    noisy = np.where(random.random(300) < 0.3, 1 - y[:300], y[:300])
    return {
        "X": X[:300], "y": noisy, "X_clean": X[300:340], "y_clean": y[300:340],
        "X_test": X[340:], "y_test": y[340:],
    }  # fmt: skip


def run(names, example, **changes):
    for old, new in changes.items():
        assert old in example
        example = example.replace(old, new)
    exec(compile(example, "docs/noisy_labels.md", "exec"), names)


def test_there_are_four_examples():
    assert len(EXAMPLES) == 4


def test_the_first_example_runs(names):
    run(names, EXAMPLES[0])
    assert names["model"].outcome_


def test_clean_rows_pass_through_a_pipeline_and_a_grid_search(names):
    with sklearn.config_context(enable_metadata_routing=True):
        run(names, EXAMPLES[1])
        model = names["model"]
        noisy = make_pipeline(StandardScaler(), LogisticRegression()).fit(names["X"], names["y"])
        assert model.score(names["X_test"], names["y_test"]) >= noisy.score(names["X_test"], names["y_test"])
        assert model.score(names["X_test"], names["y_test"]) > 0.9
        run(names, EXAMPLES[2])
    search = names["search"]
    assert set(search.best_params_) == {"classify__row_deviation"}
    assert len(search.cv_results_["params"]) == 2
    # The score is that of the clean rows set aside, which no fit has seen.
    scores = search.cv_results_["mean_test_score"]
    clean = search.best_estimator_.score(names["X_score"], names["y_score"])
    assert scores.max() == pytest.approx(clean)
    assert len(names["X_fit"]) == len(names["X_score"]) == 20


def test_the_plain_problem_runs(names):
    scaled = StandardScaler().fit(names["X"])
    names |= {name: scaled.transform(names[name]) for name in ("X", "X_clean", "X_test")}
    changes = {"30_000": "300", "temperatures=100": "temperatures=20"}
    run(names, EXAMPLES[3], **changes)
