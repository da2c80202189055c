"""The scales of noisy and clean rows: honest data pass, rows that were not transformed alike are rejected."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from bilevax.applications.clean_scale import check_scales

COUNTS = (1, 2, 3, 5, 20, 100)


def texts(random, count):
    """Rows of rare words, by Zipf's law: most words of a row are in few other rows."""
    words = np.minimum(random.zipf(1.3, (count, 60)), 5000) - 1
    rows = np.repeat(np.arange(count), 60)
    values = random.lognormal(0, 1, rows.shape)
    return sparse.csr_matrix((values, (rows, words.ravel())), (count, 5000))


def one_hot(random, count):
    """Standardized one-hot columns, from frequent to very rare."""
    rates = np.array([0.5, 0.2, 0.05, 0.01, 0.001, 0.0001])
    return (random.random((count, 6)) < rates) / np.sqrt(rates) - np.sqrt(rates)


HONEST = {
    "normal": lambda random, count: random.normal(size=(count, 4)),
    "one feature": lambda random, count: random.normal(size=(count, 1)),
    "far from zero": lambda random, count: 1e4 + random.normal(size=(count, 3)),
    "heavy tails": lambda random, count: random.lognormal(0, 3, (count, 3)),
    "one heavy tail": lambda random, count: random.lognormal(0, 4, (count, 1)),
    "no mean": lambda random, count: random.standard_cauchy((count, 2)),
    "equal heavy tails": lambda random, count: random.lognormal(0, 3, (count, 1)) * np.ones(5),
    "constants": lambda random, count: np.ones((count, 3)) * [0.0, 1.0, 1e6],
    "counts": lambda random, count: random.poisson(0.3, (count, 5)).astype(float),
    "texts": texts,
    "one-hot": one_hot,
}


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("clean", COUNTS)
def test_rows_of_one_distribution_pass(kind, clean):
    for seed in range(20):
        random = np.random.default_rng(seed)
        for count in (50, 3000):
            check_scales(HONEST[kind](random, count), HONEST[kind](random, clean))


def test_clean_rows_of_one_group_pass():
    """Clean rows may come from one site, from one day, or from the most active users."""
    random = np.random.default_rng(0)
    X = StandardScaler().fit_transform(
        np.c_[random.random(2000) < 0.03, np.arange(2000.0), random.lognormal(0, 1, (2000, 3))]
    )
    check_scales(X, X[X[:, 0] > 1])
    check_scales(X, X[-20:])
    check_scales(X, X[np.argsort(-X[:, 2:].sum(1))[:20]])


def test_a_feature_that_only_one_part_has_is_not_compared():
    random = np.random.default_rng(0)
    X, X_clean = random.normal(size=(500, 3)), random.normal(size=(20, 3))
    X[:, 0] = 0.0
    X_clean[:, 1] = 0.0
    check_scales(X, X_clean)
    check_scales(np.zeros((500, 3)), X_clean)


@pytest.mark.parametrize("clean", [3, 5, 20, 100])
@pytest.mark.parametrize("scaler", [StandardScaler(), MinMaxScaler()])
def test_rows_that_were_not_scaled_alike_are_rejected(scaler, clean):
    X = load_breast_cancer().data
    scaled = scaler.fit_transform(X)
    for noisy, few in ((scaled, X[:clean]), (X, scaled[:clean])):
        with pytest.raises(
            ValueError, match=r"X_clean must be on the scale of X, but in \d+ of \d+ features"
        ):
            check_scales(noisy, few)
    check_scales(scaled, scaled[:clean])
    check_scales(X, X[:clean])


def test_grey_values_of_two_ranges_are_rejected_also_if_sparse():
    random = np.random.default_rng(0)
    images = sparse.csr_matrix(random.integers(1, 256, (1000, 300)) * (random.random((1000, 300)) < 0.2))
    for X, X_clean in ((images, images[:30] / 255), (images / 255, images[:30])):
        with pytest.raises(ValueError, match="on the scale of X"):
            check_scales(X, X_clean)
        with pytest.raises(ValueError, match="on the scale of X"):
            check_scales(X.toarray(), X_clean)
    check_scales(images, images[:30])


def test_dense_and_sparse_rows_can_be_compared():
    X = np.random.default_rng(0).normal((0, 0, 100), size=(500, 3))
    zeros = np.zeros((20, 3))
    for noisy in (X, sparse.csr_matrix(X)):
        for clean in (zeros, sparse.csr_matrix(zeros)):
            with pytest.raises(ValueError, match=r"feature 2 has 9\d\.?\d* to 10\d in X and 0 in X_clean"):
                check_scales(noisy, clean)
        check_scales(noisy, sparse.csr_matrix(X[:20]))


def test_the_error_names_the_feature_that_differs_most():
    random = np.random.default_rng(0)
    X = random.normal(size=(500, 3))
    with pytest.raises(
        ValueError, match=r"feature 1 has 0\.\d+ in X and [\d.]+e\+03 in X_clean.*transform_input"
    ):
        check_scales(X, X[:20] * [20, 9000, 20])


@pytest.mark.parametrize("count", [20, 60])
def test_ordinary_features_that_were_not_standardised_with_the_rest_are_rejected(count):
    random = np.random.default_rng(0)
    rows = 6 + 3 * random.normal(size=(1500, 10))
    scaled = StandardScaler().fit(rows)
    check_scales(scaled.transform(rows), scaled.transform(rows[:count]))
    with pytest.raises(ValueError, match=r"10 of 10 features.*transform_input"):
        check_scales(scaled.transform(rows), rows[:count])
