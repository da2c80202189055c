"""Groups with fewer rows than features: the space of their rows has the same F, gradients and fits."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor, row_chunks
from bilevax.applications.grouped.blocks import folds_of
from bilevax.applications.grouped.closed_form import Evidence, SquaredCrossValidation, fit_sums
from bilevax.applications.grouped.losses import classification_loss, regression_loss
from bilevax.applications.grouped.newton import CrossValidation, fit_tiles
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior
from bilevax.applications.grouped.row_parabolas import RowParabolas
from bilevax.applications.grouped.row_space import RowCrossValidation, RowEvidence, fewer_rows, fit_rows
from bilevax.applications.grouped.start import Parabolas, random_effects
from bilevax.applications.grouped.sums import group_sums


@pytest.fixture
def doubles():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def some_panel(known=0, lengths=(1, 2, 5, 3, 4, 7), size=6):
    random, n = np.random.default_rng(0), sum(lengths)
    rows = np.concatenate([np.ones((n, 1)), random.normal(size=(n, size - 1))], 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    known = random.normal(size=(len(lengths), known))
    return Panel(rows, random.normal(size=n), random.uniform(0.5, 2, n), offsets, known)


def some_x(prior):
    random = np.random.default_rng(1)
    start = prior.start(np.zeros((prior.size, 1)), 0.5)
    return {name: one + 0.3 * random.normal(size=one.shape) for name, one in start.items()}


LOSSES = {
    "squared": regression_loss("squared", 0.5, 1.0),
    "huber": regression_loss("huber", 0.5, 0.7),
    "quantile": regression_loss("quantile", 0.9, 0.2),
    "poisson": regression_loss("poisson", 0.5, 1.0),
    "logistic": classification_loss("logistic", 2),
}
FORMS = ("full", "low_rank", "diagonal", "ridge", "full")


@pytest.mark.parametrize(("name", "form"), list(zip(LOSSES, FORMS, strict=True)))
def test_the_space_of_rows_has_the_same_loss_gradient_and_fits(name, form, doubles):
    loss, panel = LOSSES[name], some_panel(known=2)
    if name in ("poisson", "logistic"):
        panel = dataclasses.replace(panel, target=(panel.target > 0) * 1.0)
    prior = Prior(form, 6, rank=2 if form == "low_rank" else 0, known=2)
    x, blocks = some_x(prior), folds_of(panel, 3, 0, judge="groups", newcomers=0.3)
    rows, features = RowCrossValidation(blocks, prior, loss), CrossValidation(blocks, prior, loss)
    value, gradient = rows.value_and_gradient(x)
    expected, slope = features.value_and_gradient(x)
    assert value == pytest.approx(expected, rel=1e-7)
    for key in x:
        np.testing.assert_allclose(gradient[key], slope[key], atol=1e-6)
    folds = np.arange(1, blocks.folds)
    for one, other in zip(rows.errors(folds, x), features.errors(folds, x), strict=True):
        np.testing.assert_allclose(np.sort(one), np.sort(other), atol=1e-5)
    for one, other in zip(rows.predictions(folds, x), features.predictions(folds, x), strict=True):
        np.testing.assert_allclose(np.sort(one, 0), np.sort(other, 0), atol=1e-5)
    found, known = (fit(panel, prior, loss, x, variance=True) for fit in (fit_rows, fit_tiles))
    for one, other in zip(found, known, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_space_of_rows_has_the_same_evidence(doubles, monkeypatch):
    panel, loss = some_panel(known=1), LOSSES["squared"]
    prior = Prior("full", 6, known=1)
    x, sums, blocks = some_x(prior), group_sums(panel), folds_of(panel, 3, 0)
    monkeypatch.setattr(row_chunks, "_ENTRIES", 2 * 4 * 12)  # several chunks of a length
    rows = RowCrossValidation(blocks, prior, loss, RowEvidence(panel, prior, loss, 0.6))
    sums_too = SquaredCrossValidation(blocks, prior, evidence=Evidence(prior, sums, panel.known, 0.6))
    some = np.flatnonzero(blocks.group < 4)
    for one, other in ((rows, sums_too), (rows.part(some), sums_too.part(some))):
        value, gradient = one.value_and_gradient(x)
        expected, slope = other.value_and_gradient(x)
        assert value == pytest.approx(expected, rel=1e-10)
        for key in x:
            np.testing.assert_allclose(gradient[key], slope[key], atol=1e-9)
    for one, other in zip(
        fit_rows(panel, prior, loss, x, variance=True), fit_sums(panel, prior, x, variance=True), strict=False
    ):
        np.testing.assert_allclose(one, other, atol=1e-9)


def test_learning_starts_from_the_same_random_effects_model(doubles):
    panel, prior, loss = some_panel(known=1), Prior("full", 6, known=1), LOSSES["squared"]
    pooled = np.linspace(-0.1, 0.1, 6)[:, None]
    found, expected = (
        random_effects(kind.of(panel, loss, pooled, 1.0), prior, pooled) for kind in (RowParabolas, Parabolas)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)


def test_rows_are_taken_where_they_are_far_fewer_than_features():
    squared, classes = LOSSES["squared"], classification_loss("logistic", 3)
    assert fewer_rows(some_panel(size=40), squared)
    assert not fewer_rows(some_panel(size=20), squared)  # features cost little
    assert not fewer_rows(some_panel(size=40, lengths=(40, 50)), squared)
    assert not fewer_rows(some_panel(size=40), classes)


def test_hundreds_of_features_with_few_rows_are_learnt(tmp_path):
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(150), 4)
    beta = np.zeros((150, 200))
    beta[:, :2] = np.array([2.0, 1.0]) + random.normal(size=(150, 2))

    def drawn(groups):
        X = random.normal(size=(len(groups), 200))
        return X, (X * beta[groups]).sum(1) + 0.3 * random.normal(size=len(groups))

    X, y = drawn(of)
    model = GroupedRegressor(random_state=0).fit(X, y, groups=of)
    assert model.prior_.deviation[:2].min() > 2 * model.prior_.deviation[2:].mean()
    np.testing.assert_allclose(model.prior_.coef[:2], [2.0, 1.0], atol=0.3)
    X_new, y_new = drawn(of)
    assert np.mean((model.predict(X_new, groups=of) - y_new) ** 2) < 0.8 * np.mean(
        (X_new @ [2.0, 1.0, *np.zeros(198)] - y_new) ** 2
    )
    with pytest.warns(UserWarning, match="there are 600 only: they may be far too narrow"):
        model.predict_interval(X_new, groups=of)
    model.save(tmp_path / "model.npz")
    again = GroupedRegressor.load(tmp_path / "model.npz")
    np.testing.assert_allclose(again.predict(X_new, groups=of), model.predict(X_new, groups=of))


def test_classes_and_quantiles_of_wide_groups_are_learnt():
    random = np.random.default_rng(0)
    of, X = np.repeat(np.arange(60), 4), random.normal(size=(240, 40))
    y = 2 * X[:, 0] + X[:, 1] * random.normal(size=60)[of] + 0.3 * random.normal(size=240)
    model = GroupedClassifier(random_state=0).fit(X, y > 0, groups=of)
    assert model.prior_.coef[0] > 3 * np.abs(model.prior_.coef[2:]).max()
    assert model.score(X, y > 0, groups=of) > 0.85
    high = GroupedRegressor(loss="quantile", quantile=0.9, random_state=0).fit(X, y, groups=of)
    assert np.mean(y <= high.predict(X, groups=of)) > 0.8
