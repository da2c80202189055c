"""`bilevax reproduce grouped`: the baselines are what they say, and the command writes its tables."""

from __future__ import annotations

import csv
import dataclasses
import os
from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("typer")
from sklearn.linear_model import LogisticRegression, QuantileRegressor, Ridge
from typer.testing import CliRunner

from bilevax.cli import app
from bilevax.data import generate
from bilevax.experiments import grouped, grouped_trials
from bilevax.experiments.grouped_baselines import (
    Sums,
    _fit_intercepts,
    group_intercepts,
    laplace_em,
    logistic_intercepts,
    squared_baselines,
)
from bilevax.experiments.grouped_batches import Batch, logistic, quantile_regression
from bilevax.experiments.grouped_panels import Rows, generated, known_normal, skewed
from bilevax.experiments.grouped_quantiles import em_quantile, pooled, quantile_baselines


@pytest.fixture(scope="module")
def panel():
    split = generated(300, 0)
    return split.train, split.test


def test_ridges_from_sums_are_those_of_scikit_learn(panel):
    train, _ = panel
    sums = Sums.of(train, np.arange(len(train.y)) % 5)
    X, y = train.of(3)
    found = sums.ridge(2.0, np.zeros(9), np.diag(np.arange(9) > 0))[3]
    expected = Ridge(alpha=2.0).fit(X[:, 1:], y)
    np.testing.assert_allclose(found, [expected.intercept_, *expected.coef_], atol=1e-5)
    held = np.arange(train.offsets[3], train.offsets[4]) % 5
    error = 0.0
    for k in range(5):
        fit = Ridge(alpha=2.0).fit(X[held != k, 1:], y[held != k])
        error += np.sum((fit.predict(X[held == k, 1:]) - y[held == k]) ** 2)
    assert sums.errors(2.0, np.zeros(9), np.diag(np.arange(9) > 0))[3] == pytest.approx(error, rel=1e-3)


def test_expectation_maximisation_finds_the_truth_it_was_drawn_from(panel):
    train, test = panel
    mean, covariance, noise = Sums.whole(train).expectation_maximisation()
    random = np.random.default_rng(0)
    truth, mix = random.normal(size=9), 0.3 * random.normal(size=(9, 9))
    assert np.abs(mean - truth).max() < 0.3
    assert np.abs(covariance - mix @ mix.T).max() < 0.4 * np.abs(mix @ mix.T).max()
    assert noise == pytest.approx(1.0, abs=0.1)
    losses = {}
    for name, fit in squared_baselines(train, 0).items():
        losses[name] = np.mean(((test.X * fit()[test.group]).sum(1) - test.y) ** 2)
    assert losses["EM"] < losses["shared α around pooled"] < losses["shared α"] < losses["pooled"]


def test_group_intercepts_and_logistic_fits_are_those_of_other_code():
    random = np.random.default_rng(0)
    X = np.concatenate([np.ones((60, 1)), random.normal(size=(60, 2))], 1)
    rows = Rows(X, random.normal(size=60), np.array([0, 20, 60]))
    hot = np.concatenate([np.eye(2)[rows.group], X[:, 1:]], 1)
    expected = np.linalg.lstsq(hot, rows.y, rcond=None)[0]
    np.testing.assert_allclose(
        group_intercepts(rows), [[expected[i], *expected[2:]] for i in (0, 1)], atol=1e-9
    )
    y = (random.random(60) < 0.5).astype(float)
    batch = Batch(Rows(X, y, rows.offsets))
    ours, _ = logistic(
        batch, batch.real * 1.0, np.zeros(3), np.diag([1e-9, 0.5, 0.5]), np.zeros((2, 3)), enough=1e-7
    )
    for i, (a, b) in enumerate([(0, 20), (20, 60)]):
        theirs = LogisticRegression(C=2.0, tol=1e-8).fit(X[a:b, 1:], y[a:b])
        np.testing.assert_allclose(ours[i], [theirs.intercept_[0], *theirs.coef_[0]], atol=1e-4)


def test_logistic_intercepts_are_those_of_one_hot_groups():
    random = np.random.default_rng(0)
    group = np.sort(random.integers(0, 12, 200))
    X = np.concatenate([np.ones((200, 1)), random.normal(size=(200, 2))], 1)
    eta = X @ [0.2, 1.0, -0.5] + random.normal(size=12)[group]
    y = (random.random(200) < 1 / (1 + np.exp(-eta))).astype(float)
    y[group == 3] = 1.0  # one class: without a strength there would be no finite intercept
    rows = Rows.by(X, y, group)
    for strength in (0.5, 4.0):
        found = _fit_intercepts(rows, np.ones(200), strength, np.zeros((12, 3)))
        # scikit-learn has one strength for all columns: slopes have hardly any as long columns.
        hot = np.concatenate([np.eye(12)[group], 1e4 * X[:, 1:]], 1)
        theirs = LogisticRegression(C=1 / strength, tol=1e-10, solver="newton-cholesky").fit(hot, y)
        np.testing.assert_allclose(found[:, 1:], np.tile(1e4 * theirs.coef_[0, 12:], (12, 1)), atol=1e-4)
        np.testing.assert_allclose(found[:, 0], theirs.intercept_ + theirs.coef_[0, :12], atol=1e-4)
    chosen = logistic_intercepts(rows, 0)
    assert np.isfinite(chosen).all()
    assert np.ptp(chosen[:, 1:], axis=0).max() == 0
    assert np.ptp(chosen[:, 0]) > 0.1


def test_quantile_regressions_are_those_of_scikit_learn():
    split = skewed(3, 0)
    rows, size = split.train, 5
    batch, none = Batch(rows), 1e-9 * np.eye(size)
    for quantile in (0.1, 0.9):
        found = quantile_regression(
            batch, batch.real * 1.0, quantile, np.zeros(size), none, np.zeros((3, size)), 2000, 1e-9
        )
        for i in range(3):
            X, y = rows.of(i)
            theirs = QuantileRegressor(quantile=quantile, alpha=0.0).fit(X[:, 1:], y)
            best = np.array([theirs.intercept_, *theirs.coef_])
            losses = [
                np.mean(np.maximum(quantile * r, (quantile - 1) * r))
                for r in (y - X @ found[i], y - X @ best)
            ]
            assert losses[0] == pytest.approx(losses[1], abs=3e-3)


def test_quantile_baselines_hold_their_share_of_rows_and_em_needs_normal_noise():
    split = generated(200, 0)
    below = np.mean(split.test.y <= em_quantile(split.train, split.test, 0.9, None))
    assert below == pytest.approx(0.9, abs=0.02)
    split = skewed(100, 0, known=2)
    assert np.mean(split.train.y <= split.train.X @ pooled(split.train, 0.1)) == pytest.approx(0.1, abs=0.02)
    for name, method in quantile_baselines(split, 0.5, 0).items():
        predicted = method()
        assert predicted.shape == split.test.y.shape, name
        assert 0.3 < np.mean(split.test.y <= predicted) < 0.7, name


def test_em_on_metadata_uses_what_is_known_of_groups():
    split = known_normal(300, 0)
    sums = Sums.whole(split.train)
    errors = []
    for known in (None, split.known):
        mean, covariance, noise = sums.expectation_maximisation(known)
        beta = sums.posterior(mean, covariance, noise)
        errors.append(np.mean(((split.test.X * beta[split.test.group]).sum(1) - split.test.y) ** 2))
    assert errors[1] < errors[0] - 0.03


def test_laplace_em_moves_the_prior_towards_the_truth():
    random = np.random.default_rng(0)
    group = np.repeat(np.arange(200), 20)
    X = np.concatenate([np.ones((4000, 1)), random.normal(size=(4000, 1))], 1)
    beta = np.array([0.5, -1.0]) + random.normal(size=(200, 2)) * [0.2, 1.0]
    y = (random.random(4000) < 1 / (1 + np.exp(-(X * beta[group]).sum(1)))).astype(float)
    _, mean, covariance = laplace_em(Rows(X, y, np.arange(201) * 20))
    assert np.abs(mean - [0.5, -1.0]).max() < 0.2
    assert 0.6 < covariance[1, 1] ** 0.5 < 1.3
    assert covariance[0, 0] ** 0.5 < 0.4


def test_the_command_writes_its_tables(monkeypatch, tmp_path):
    table = generate.interactions(60, 80, 1500, seed=0).table
    monkeypatch.setattr(grouped_trials, "load_interactions", lambda name: table)
    small = grouped.GroupedOptions(
        splits=2,
        users=40,
        logistic_users=30,
        quantile_users=20,
        generated=30,
        new_users=10,
        factors=2,
        priors=("diagonal",),
        parts=("squared", "logistic", "grunfeld", "skewed_known", "known", "new"),
    )
    monkeypatch.setattr(grouped.GroupedOptions, "quick", lambda self: small)
    result = CliRunner().invoke(app, ["reproduce", "grouped", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ("statsmodels is not installed" in result.output) == (find_spec("statsmodels") is None)
    for name in ("skewed_known", "known", "squared", "logistic", "new"):
        with (tmp_path / "grouped" / f"grouped_{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert rows
        if name in ("squared", "logistic"):
            assert {"pooled", "own α", "shared α around pooled"} < {row["method"] for row in rows}
            assert rows[-1]["method"].endswith(", diagonal")
    result = CliRunner().invoke(app, ["reproduce", "grouped", "--part", "cubed", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "parts must be of" in result.output


def test_a_run_goes_on_where_it_was_stopped_and_takes_other_parts(monkeypatch, tmp_path):
    small = {"generated": 20, "priors": ("ridge",), "boosted": 0}
    first = grouped.GroupedOptions(splits=1, parts=("generated",), **small)
    before = grouped.run(first, tmp_path)["generated"]
    seen = []

    def measure(options, piece):
        seen.append(piece.name)
        return {("", piece.kind): grouped.Scores(np.array([1.0, 2.0]), 1.5, None, 0.1)}

    monkeypatch.setattr(grouped, "measure", measure)
    more = dataclasses.replace(first, parts=("generated", "known"))
    after = grouped.run(more, tmp_path, resume=True)
    assert seen == ["known, split 0, baselines", "known, split 0, ours"]
    assert after["generated"] == before
    assert [row["method"] for row in after["known"]] == ["baselines", "ours"]
    assert "boosting, groups encoded" not in {row["method"] for row in before}
    with pytest.raises(ValueError, match="resume needs the options"):
        grouped.run(dataclasses.replace(more, generated=30), tmp_path, resume=True)


def test_jobs_in_several_processes_give_the_same_tables(tmp_path):
    options = grouped.GroupedOptions(splits=2, generated=20, priors=("ridge",), parts=("generated",))
    before = os.environ.get("JAX_PLATFORMS")
    alone = grouped.run(options, tmp_path / "alone")["generated"]
    both = grouped.run(dataclasses.replace(options, processes=2), tmp_path / "both")["generated"]
    for one, other in zip(alone, both, strict=True):
        assert {n: v for n, v in one.items() if n != "seconds"} == {
            n: v for n, v in other.items() if n != "seconds"
        }
    assert os.environ.get("JAX_PLATFORMS") == before
