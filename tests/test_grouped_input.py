"""Odd panels, groups and metadata for the grouped estimators: documented behaviour, or clear errors."""

from __future__ import annotations

import datetime
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy import sparse
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from bilevax.applications.grouped import (
    GroupedClassifier,
    GroupedRegressor,
    base,
    closed_form,
    regressor,
    tiles,
)
from bilevax.applications.grouped.blocks import folds_of
from bilevax.applications.grouped.closed_form import SquaredCrossValidation
from bilevax.applications.grouped.group_index import GroupIndex, checked
from bilevax.applications.grouped.losses import regression_loss
from bilevax.applications.grouped.metadata import Encoder
from bilevax.applications.grouped.newton import CrossValidation
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import Prior


@pytest.fixture(scope="module")
def fitted():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(40), 6)
    X = random.normal(size=(240, 2))
    y = (X * (np.array([1.0, -1.0]) + random.normal(size=(40, 2)))[of]).sum(1) + 0.3 * random.normal(size=240)
    return GroupedRegressor(prior="ridge", random_state=0).fit(X, y, groups=of), X, y, of


def test_groups_of_another_type_than_in_the_fit_are_warned_of(fitted):
    model, X, _, _ = fitted
    with pytest.warns(UserWarning, match="groups were of type number in the fit, got str: none is known"):
        found = model.predict(X[:2], groups=["0", "1"])
    np.testing.assert_allclose(found, model.predict(X[:2]))
    model.predict(X[:2], groups=np.array([1000, 2000]))  # new ones of the same type: no warning


def test_no_groups_are_refused_where_unseen_ones_are(fitted):
    model, X, _, _ = fitted
    model.set_params(unseen="error")
    with pytest.raises(ValueError, match='groups must be given as unseen="error", got None'):
        model.predict(X)
    model.set_params(unseen="prior")


def test_intervals_of_many_rows_are_made_in_pieces(fitted, monkeypatch):
    model, X, _, of = fitted
    mixed = np.where(np.arange(len(of)) % 5 > 0, of, 999)
    whole = model.predict_interval(X, groups=mixed)
    monkeypatch.setattr(regressor, "_ENTRIES", 60)
    for one, other in zip(model.predict_interval(X, groups=mixed), whole, strict=True):
        np.testing.assert_allclose(one, other)


def test_a_model_of_one_row_per_group_follows_the_prior_and_says_so():
    random = np.random.default_rng(0)
    X = random.normal(size=(120, 2))
    y = X @ [1.0, 2.0] + 0.1 * random.normal(size=120)
    with pytest.warns(UserWarning, match="no group has two rows"):
        model = GroupedRegressor(prior="ridge", random_state=0).fit(X, y, groups=np.arange(120))
    np.testing.assert_allclose(model.prior_.coef, [1.0, 2.0], atol=0.1)
    assert model.shrinkage_.max() < 0.01
    np.testing.assert_allclose(model.coef_, np.tile(model.prior_.coef, (120, 1)), atol=0.01)


def test_more_features_than_memory_allows_are_refused_before_anything_is_computed(monkeypatch):
    with pytest.raises(ValueError, match=r"X must have at most 8,191 features, got 9,000"):
        GroupedRegressor().fit(np.eye(4, 9000), np.arange(4.0), groups=[1, 1, 2, 2])
    with pytest.raises(ValueError, match=r"X must have at most 2,362 features with folds=5, got 5,000"):
        base._most_groups(5_001, 5)
    monkeypatch.setattr(base, "_ENTRIES", 6 * 4**2 * 10)
    assert base._most_groups(3, 5) == 10


def test_wide_rows_are_solved_in_small_chunks_with_the_same_result(monkeypatch):
    random = np.random.default_rng(0)
    rows = np.concatenate([np.ones((40, 1)), random.normal(size=(40, 2))], 1)
    panel = Panel(rows, random.normal(size=40), np.ones(40), np.arange(0, 41, 4), np.zeros((10, 0)))
    prior, loss, blocks = Prior("ridge", 3), regression_loss("squared", 0.5, 1.0), folds_of(panel, 2, 0)
    x = prior.start(np.zeros((3, 1)), 0.5)
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    whole = SquaredCrossValidation(blocks, prior).value_and_gradient(x)
    monkeypatch.setattr(closed_form, "_ENTRIES", 16 * 8)
    monkeypatch.setattr(tiles, "_ENTRIES", 9 * 8)
    for judge in (SquaredCrossValidation(blocks, prior), CrossValidation(blocks, prior, loss)):
        assert len(judge.chunks) > 1
        value, gradient = judge.value_and_gradient(x)
        assert value == pytest.approx(whole[0], rel=1e-9)
        np.testing.assert_allclose(gradient["mean"], whole[1]["mean"], atol=1e-9)
    jax.config.update("jax_enable_x64", before)


def test_dates_are_the_same_groups_in_every_form():
    days = ["2024-01-01", "2024-01-02", "2024-01-01"]
    index = GroupIndex.of(pd.Series(pd.to_datetime(days)), 3)
    assert index.ids.tolist() == [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)]
    for same in (
        np.array(days, "datetime64[D]"),
        [pd.Timestamp(one) for one in days],
        [datetime.datetime.fromisoformat(one) for one in days],
    ):
        assert index.codes(same, 3).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "ids",
    [
        list(np.arange(8)),
        [np.bool_(one % 2) for one in range(8)],
        pd.Categorical(list("abcdefgh")),
        pd.date_range("2024-01-01", periods=8, tz="Europe/Rome"),
        [datetime.date(2024, 1, 1 + one) for one in range(8)],
        [("shop", datetime.datetime(2024, 1, 1 + one), one) for one in range(8)],
    ],
)
def test_groups_of_every_type_are_saved(ids, tmp_path):
    X = np.random.default_rng(0).normal(size=(16, 2))
    groups = [one for one in ids for _ in range(2)]
    model = GroupedRegressor(prior="ridge", max_iter=1, random_state=0).fit(X, X @ [1.0, 2.0], groups=groups)
    model.save(tmp_path / "model.npz")
    again = GroupedRegressor.load(tmp_path / "model.npz")
    assert again.groups_.tolist() == model.groups_.tolist()
    np.testing.assert_array_equal(again.predict(X, groups=groups), model.predict(X, groups=groups))


def test_a_group_that_was_adapted_without_a_name_is_saved(fitted, tmp_path):
    model, X, y, of = fitted
    wiser = model.adapt(X[:3], y[:3] + 5.0)
    wiser.save(tmp_path / "model.npz")
    again = GroupedRegressor.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.predict(X), wiser.predict(X))
    np.testing.assert_array_equal(again.predict(X, groups=of), wiser.predict(X, groups=of))
    assert repr(again.groups_[-1]) == "<a new group>"


def test_groups_that_files_cannot_hold_are_refused(fitted, tmp_path):
    model, X, y, _ = fitted
    with pytest.raises(TypeError, match="must be numbers, strings, dates or tuples of them to be saved"):
        model.adapt(X[:3], y[:3], groups=[frozenset()] * 3).save(tmp_path / "model.npz")


def test_weights_of_zero_leave_rows_and_groups_out(fitted):
    _, X, y, of = fitted
    weight = np.where(of == 3, 0.0, 2.0)
    weight[::7] = 0.0
    some = weight > 0
    plain = GroupedRegressor(prior="ridge", random_state=0).fit(X[some], y[some], groups=of[some])
    wrong = np.where(some, y, 1e6)
    model = GroupedRegressor(prior="ridge", random_state=0).fit(X, wrong, groups=of, sample_weight=weight)
    assert 3 not in model.groups_
    np.testing.assert_allclose(model.predict(X, groups=of), plain.predict(X, groups=of), atol=1e-9)


@pytest.mark.parametrize("turned", [sparse.csr_matrix, sparse.coo_array, np.ndarray.tolist, pd.DataFrame])
def test_rows_may_be_sparse_lists_or_frames(fitted, turned):
    model, X, y, of = fitted
    again = GroupedRegressor(prior="ridge", random_state=0).fit(turned(X), list(y), groups=list(of))
    np.testing.assert_allclose(again.predict(turned(X), groups=of), model.predict(X, groups=of), atol=1e-9)


@pytest.mark.parametrize("kind", ["category", "string", "object"])
def test_groups_of_a_frame_are_those_of_a_list(fitted, kind):
    _, X, y, of = fitted
    named = pd.Series([f"shop {one}" for one in of], index=np.arange(len(of))[::-1])
    typed = named.astype(kind)
    if kind == "category":
        typed = typed.cat.add_categories("closed")  # has no rows
    again = GroupedRegressor(prior="ridge", random_state=0).fit(X, y, groups=typed)
    assert "closed" not in again.groups_
    plain = GroupedRegressor(prior="ridge", random_state=0).fit(X, y, groups=list(named))
    np.testing.assert_array_equal(again.predict(X, groups=typed), plain.predict(X, groups=list(named)))


def test_estimators_are_cloned_and_pickled_as_they_are(fitted):
    model, X, _, of = fitted
    again = clone(model)
    assert again.get_params() == model.get_params()
    assert not hasattr(again, "coef_")
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(model)).predict(X, groups=of), model.predict(X, groups=of)
    )


def test_weights_and_groups_are_routed_through_a_search(fitted):
    _, X, y, of = fitted
    with sklearn.config_context(enable_metadata_routing=True):
        model = GroupedRegressor(prior="ridge", max_iter=2, random_state=0)
        model = model.set_fit_request(groups=True, sample_weight=True)
        model = model.set_score_request(groups=True, sample_weight=True)
        scaler = StandardScaler().set_fit_request(sample_weight=True).set_output(transform="pandas")
        pipe = Pipeline([("scale", scaler), ("model", model)])
        search = GridSearchCV(
            pipe, {"model__judge": ["rows", "groups"]}, cv=GroupKFold(3), error_score="raise"
        )
        weight = np.where(of < 2, 0.0, 1.0)
        search.fit(pd.DataFrame(X, columns=["a", "b"]), y, groups=of, sample_weight=weight)
    assert len(search.best_estimator_[-1].groups_) == 38
    assert np.isfinite(search.best_score_)


@pytest.mark.parametrize(
    "groups",
    [
        pd.Series([1, None, 2], dtype="Int64"),
        pd.Series(["a", None, "b"]),
        pd.Series(pd.to_datetime(["2024-01-01", None, "2024-01-02"])),
        [1, float("nan"), 2],
        [1, np.float32("nan"), 2],
        [1, pd.NA, "b"],
        pd.Categorical(["a", None, "b"]),
    ],
)
def test_missing_groups_are_refused_in_every_form(groups):
    with pytest.raises(ValueError, match=r"groups must not be missing, got .* in row 1"):
        checked(groups, 3)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, float("inf")])
def test_missing_metadata_is_refused_when_fitting_and_when_predicting(missing):
    with pytest.raises(ValueError, match=r"metadata must be there and finite, got .* as 0 of group 'b'"):
        Encoder.of({"a": 1.0, "b": missing}, ["a", "b"])
    encoder = Encoder.of({"a": 1.0, "b": 2.0}, ["a", "b"])
    with pytest.raises(ValueError, match=r"metadata must be there and finite, got .* as 0 of group 'new'"):
        encoder.encode({"new": missing}, ["new"])


def test_metadata_of_another_kind_than_in_the_fit_is_refused():
    encoder = Encoder.of(pd.DataFrame({"age": [1.0, 2.0]}, index=["a", "b"]), ["a", "b"])
    with pytest.raises(ValueError, match="metadata must have numbers as 'age', as in the fit, got 'old'"):
        encoder.encode(pd.DataFrame({"age": ["old"]}, index=["new"]), ["new"])
    with pytest.raises(ValueError, match="metadata must have the column 'age' of the fit"):
        encoder.encode(pd.DataFrame({"size": [1.0]}, index=["new"]), ["new"])


def test_counts_of_zero_and_classes_that_are_no_text(tmp_path):
    random = np.random.default_rng(0)
    of, X = np.repeat(np.arange(20), 5), random.normal(size=(100, 2))
    none = GroupedRegressor(loss="poisson", prior="ridge", max_iter=5, random_state=0)
    assert none.fit(X, np.zeros(100), groups=of).predict(X, groups=of).max() < 0.01
    model = GroupedClassifier(prior="ridge", max_iter=2, random_state=0)
    model.fit(X, np.array([True, False] * 50, object).astype(bool), groups=of)
    model.save(tmp_path / "model.npz")
    again = GroupedClassifier.load(tmp_path / "model.npz")
    assert again.predict(X, groups=of).dtype == bool
    model.classes_ = model.classes_.astype(object)
    with pytest.raises(TypeError, match="classes must be numbers or strings to be saved, got False"):
        model.save(tmp_path / "other.npz")


def test_wrong_targets_do_not_spoil_a_robust_fit(fitted):
    _, X, y, of = fitted
    wrong = y.copy()
    wrong[::25] += 1e5
    model = GroupedRegressor(loss="huber", prior="ridge", random_state=0).fit(X, wrong, groups=of)
    assert np.median(np.abs(model.predict(X, groups=of) - y)) < 0.5


def test_a_loss_that_cannot_be_minimised_is_warned_of(fitted):
    _, X, y, of = fitted
    model = GroupedRegressor(loss=lambda found, target: jnp.abs(found - target), prior="ridge", max_iter=3)
    with pytest.warns(UserWarning, match="could not be fitted well: the loss must be smooth and convex"):
        model.fit(X, y, groups=of)
    assert np.abs(model.predict(X, groups=of)).max() < 100


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda found, target: float(found), "ConcretizationTypeError"),
        (lambda found: found, "takes 1 positional argument"),
        (lambda found, target: jnp.ones(3) * found, r"an array of shape \(3,\)"),
    ],
)
def test_a_loss_that_is_no_function_of_jax_is_refused(fitted, loss, said):
    _, X, y, of = fitted
    with pytest.raises(TypeError, match=f"loss must be a function .* that returns one number.*{said}"):
        GroupedRegressor(loss=loss).fit(X, y, groups=of)


def test_features_and_targets_beyond_floating_point_are_refused(fitted):
    _, X, y, of = fitted
    with pytest.raises(ValueError, match="X must be of a size whose square is finite"):
        GroupedRegressor().fit(1e200 * X, y, groups=of)
    with pytest.raises(ValueError, match="y must be of a size whose square is finite"):
        GroupedRegressor().fit(X, 1e200 * y, groups=of)


def test_a_frame_as_groups_is_refused(fitted):
    _, X, y, of = fitted
    with pytest.raises(ValueError, match=r"groups must be one-dimensional, got shape \(240, 1\)"):
        GroupedRegressor().fit(X, y, groups=pd.DataFrame({"shop": of}))


def test_a_fit_without_groups_is_warned_of(fitted):
    _, X, y, _ = fitted
    with pytest.warns(UserWarning, match=r"all rows are one group.*set_fit_request\(groups=True\)"):
        GroupedRegressor(prior="ridge", max_iter=1).fit(X, y)


def test_intervals_from_few_rows_are_warned_of(fitted):
    _, X, y, of = fitted
    few = GroupedRegressor(prior="ridge", max_iter=1).fit(X[:24], y[:24], groups=of[:24])
    with pytest.warns(UserWarning, match="there are 24 only: they may be far too narrow"):
        few.predict_interval(X[:2], groups=of[:2])
