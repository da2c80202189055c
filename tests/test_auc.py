"""Partial AUC and average precision: the objectives against brute force, and the classifiers' contract."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
import equinox as eqx
import jax
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.utils.estimator_checks import estimator_checks_generator

import bilevax as bx
from bilevax.applications.auc import (
    AveragePrecisionClassifier,
    PartialAUCClassifier,
    average_precision,
    partial_auc,
    thresholds,
)

random = np.random.default_rng(0)
POSITIVES, NEGATIVES = random.normal(size=(7, 3)) + 0.5, random.normal(size=(20, 3))
X = np.array([0.7, -0.4, 1.2])
LOSSES = {
    "squared_hinge": lambda margin: np.maximum(1 - margin, 0) ** 2,
    "logistic": lambda margin: np.log1p(np.exp(-margin)),
    "sigmoid": lambda margin: 1 / (1 + np.exp(margin)),
}


def pair_losses(surrogate, negatives=NEGATIVES):
    return LOSSES[surrogate](np.subtract.outer(POSITIVES @ X, negatives @ X))


# --- objectives ---------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("surrogate", LOSSES)
@pytest.mark.parametrize("max_fpr", [0.1, 0.25, 1.0])
def test_partial_auc_is_the_mean_of_the_hardest_pairs(surrogate, max_fpr):
    problem = partial_auc(POSITIVES, NEGATIVES, max_fpr=max_fpr, surrogate=surrogate, ridge=0.3)
    losses = np.sort(pair_losses(surrogate), 1)[:, ::-1]
    hardest = round(max_fpr * len(NEGATIVES))
    expected = losses[:, :hardest].mean() + 0.15 * X @ X
    y0 = thresholds(X, POSITIVES, NEGATIVES, max_fpr=max_fpr, surrogate=surrogate)
    np.testing.assert_allclose(y0, losses[:, hardest - 1], rtol=1e-12)
    np.testing.assert_allclose(bx.objective(problem, X, np.zeros(7)), expected, rtol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("surrogate", LOSSES)
def test_average_precision_is_the_mean_share_of_positives_above(surrogate):
    problem = average_precision(POSITIVES, NEGATIVES, surrogate=surrogate, ridge=0.3)
    above, wrong = pair_losses(surrogate, POSITIVES).sum(1), pair_losses(surrogate).sum(1)
    expected = 1 - np.mean(above / (above + wrong)) + 0.15 * X @ X
    np.testing.assert_allclose(bx.objective(problem, X), expected, rtol=1e-9)
    step = 1e-6 * np.array([1.0, 2.0, -1.0])
    slope = (bx.objective(problem, X + step) - bx.objective(problem, X - step)) / 2
    np.testing.assert_allclose(bx.hypergradient(problem, X) @ step, slope, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_the_gradient_of_partial_auc_is_that_of_the_hardest_pairs():
    problem = partial_auc(POSITIVES, NEGATIVES, max_fpr=0.25)

    def value(x):
        margins = np.subtract.outer(POSITIVES @ x, np.sort(NEGATIVES @ x)[::-1][:5])
        return LOSSES["squared_hinge"](margins).mean()

    steps = 1e-6 * np.eye(3)
    expected = [(value(X + step) - value(X - step)) / 2e-6 for step in steps]
    y0 = thresholds(X, POSITIVES, NEGATIVES, max_fpr=0.25)
    # Between two losses every threshold is as good: there, no pair is at the kink.
    losses = np.sort(pair_losses("squared_hinge"), 1)[:, ::-1]
    between = jnp.asarray((losses[:, 4] + losses[:, 5]) / 2)
    np.testing.assert_allclose(y0, losses[:, 4], rtol=1e-12)
    blocks = jax.vmap(jax.grad(problem.upper), (None, 0, 0, None))
    found = blocks(jnp.asarray(X), between, jnp.asarray(POSITIVES), jnp.asarray(NEGATIVES)).mean(0)
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_fpr": 0.0}, "max_fpr must be a number above 0 and at most 1, got 0.0"),
        ({"max_fpr": "0.1"}, "max_fpr must be a number above 0 and at most 1, got '0.1'"),
        ({"surrogate": "hinge"}, r"surrogate must be one of \['squared_hinge', .*\], got 'hinge'"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        partial_auc(POSITIVES, NEGATIVES, **given)
    with pytest.raises(ValueError, match=words):
        PartialAUCClassifier(**given).fit(NEGATIVES, np.arange(20) % 2)


# --- classifiers --------------------------------------------------------------

KINDS = [PartialAUCClassifier, AveragePrecisionClassifier]


def rare(rows=1500, seed=0):
    """A rare class of two kinds; the kind that is easy to see hides the other one from a logistic loss."""
    random = np.random.default_rng(seed)
    kind = random.choice(3, rows, p=[0.94, 0.03, 0.03])
    X = random.normal(size=(rows, 6))
    X[:, 0] += 3 * (kind == 1)
    X[:, 1] += 2 * (kind == 2)
    X[:, 2] *= 1 + 3 * (kind == 0)
    return 10.0 ** np.arange(-3, 3) * X + 5, np.where(kind > 0, "rare", "common")


@pytest.fixture(scope="module")
def fitted():
    X, y = rare()
    return {kind: kind(max_iter=300, random_state=0).fit(X, y) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_ranks_as_well_as_the_regression_it_starts_from(kind, fitted):
    X, y = rare(4000, 1)
    model, positive = fitted[kind], y == "rare"
    train, labels = rare()
    deviation = train.std(0)
    start = LogisticRegression(C=1 / 1.5).fit(train / deviation, labels)
    other = start.decision_function(X / deviation) * (1 if start.classes_[1] == "rare" else -1)
    measure = average_precision_score if kind is AveragePrecisionClassifier else roc_auc_score
    most = {} if kind is AveragePrecisionClassifier else {"max_fpr": 0.1}
    assert model.score(X, y) == pytest.approx(measure(positive, model.decision_function(X), **most))
    assert model.score(X, y) > measure(positive, other, **most) - 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_linear_and_calibrated(kind, fitted):
    X, y = rare()
    model = fitted[kind]
    scores = model.decision_function(X)
    np.testing.assert_allclose(scores, X @ model.coef_[0] + model.intercept_, rtol=1e-3, atol=1e-3)
    assert model.predict_proba(X)[:, 1].mean() == pytest.approx((y == "rare").mean(), abs=0.01)
    assert set(model.predict(X)) == {"common", "rare"}
    assert model.outcome_ is bx.Outcome.FINISHED


def test_units_sparsity_and_chance_do_not_change_a_fit():
    X, y = rare(300)
    X[:, 0] = X[:, 0] > 5.003
    with pytest.warns(bx.AccuracyWarning, match="try max_iter=") as caught:
        one = PartialAUCClassifier(max_iter=30, random_state=3).fit(X, y)
    assert caught[0].filename == __file__
    other = clone(one).fit(sparse.csr_matrix(1024 * X), y)
    np.testing.assert_allclose(other.decision_function(1024 * X), one.decision_function(X), atol=1e-3)


def test_with_the_whole_curve_the_objective_is_the_auc():
    X, y = rare(300)
    model = PartialAUCClassifier(1.0, max_iter=50, random_state=0).fit(X, y)
    assert model.score(X, y) == roc_auc_score(y == "rare", model.decision_function(X))


def network():
    return eqx.nn.MLP(6, "scalar", 8, 1, key=jax.random.key(0))


def pair():
    model = network()
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return arrays, lambda x, rows: jax.vmap(eqx.combine(x, rest))(rows)


def test_a_network_may_be_given_as_a_module_or_as_parameters_and_a_function():
    X, y = rare(300)
    scores = [
        PartialAUCClassifier(model=model, max_iter=30, random_state=0).fit(X, y).decision_function(X)
        for model in (network(), pair())
    ]
    np.testing.assert_allclose(*scores, atol=1e-4)
    assert roc_auc_score(y == "rare", scores[0]) > 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_the_same(kind, fitted, tmp_path):
    X, _ = rare(50, 2)
    fitted[kind].save(tmp_path / "model.npz")
    again = kind.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.decision_function(X), fitted[kind].decision_function(X))
    assert again.outcome_ is bx.Outcome.FINISHED
    assert again.get_params()["max_iter"] == 300
    other = KINDS[kind is KINDS[0]]
    with pytest.raises(ValueError, match=f"must hold a {other.__name__}"):
        other.load(tmp_path / "model.npz")
    with pytest.raises(ValueError, match="model must be left out"):
        kind.load(tmp_path / "model.npz", network())


def test_a_saved_network_needs_its_model_again(tmp_path):
    X, y = rare(200)
    model = PartialAUCClassifier(model=network(), max_iter=2, random_state=0).fit(X, y)
    model.save(tmp_path / "model.npz")
    again = PartialAUCClassifier.load(tmp_path / "model.npz", network())
    np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))
    wider = eqx.nn.MLP(6, "scalar", 9, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match="the parameters must have the shapes"):
        PartialAUCClassifier.load(tmp_path / "model.npz", wider)
    with pytest.raises(ValueError, match="model must be that of the saved one"):
        PartialAUCClassifier.load(tmp_path / "model.npz")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"alpha": -1.0}, ValueError, "alpha must be a number from 0, got -1.0"),
        ({"max_iter": 1.5}, ValueError, "max_iter must be a whole number from 0, got 1.5"),
        ({"raise_on_interrupt": 1}, ValueError, "raise_on_interrupt must be True or False, got 1"),
        ({"model": "mlp"}, TypeError, r"an equinox module .* or a pair .*, got str"),
    ],
)
def test_bad_parameters_are_named(given, error, words):
    with pytest.raises(error, match=words):
        AveragePrecisionClassifier(**given).fit(NEGATIVES, np.arange(20) % 2)


def test_labels_of_one_class_or_of_three_are_refused():
    for labels, words in ((np.zeros(20), "only one class"), (np.arange(20) % 3, "Only binary")):
        with pytest.raises(ValueError, match=words):
            PartialAUCClassifier().fit(NEGATIVES, labels)


def test_scikit_learn_checks():
    quick = bx.SOBA(0.1, lower_step=0.01)  # it compiles in less time than the default
    model = PartialAUCClassifier(solver=quick, max_iter=5, random_state=0)
    for estimator, check in estimator_checks_generator(model):
        check(estimator)
