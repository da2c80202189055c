"""Grouped estimators do not depend on the units of targets, features, weights and losses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.applications.auc import PartialAUCClassifier
from bilevax.applications.classifier import ReweightedClassifier
from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor
from bilevax.applications.grouped.loss_units import units_of
from bilevax.applications.grouped.losses import regression_loss


@pytest.fixture(scope="module")
def panel():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(50), 8)
    X = random.normal(size=(400, 2))
    slopes = np.array([2.0, -1.0]) + random.normal(size=(50, 2)) * [1.0, 0.3]
    y = 3 + (X * slopes[of]).sum(1) + random.normal(size=50)[of] + random.normal(size=400)
    return X, y, of


def expectile(found, target):
    return jnp.where(target > found, 0.8, 0.2) * (target - found) ** 2


def predicted(panel, loss, prior="diagonal", *, of_y=1.0, shift=0.0, of_x=1.0, weight=None):
    X, y, of = panel
    model = GroupedRegressor(loss=loss, prior=prior, max_iter=20, random_state=0)
    weights = None if weight is None else np.full(len(y), weight)
    model.fit(of_x * X, of_y * y + shift, groups=of, sample_weight=weights)
    both = [model.predict(of_x * X, groups=of), model.predict(of_x * X)]
    return (np.concatenate(both) - shift) / of_y, model


@pytest.mark.parametrize("loss", [expectile, "squared", "huber", "quantile"])
def test_predictions_do_not_depend_on_units(panel, loss):
    expected, model = predicted(panel, loss)
    digits = {"atol": 1e-2} if loss == "quantile" else {"atol": 1e-4}
    changes = {"of_y": 1e4}, {"of_y": 1e-4}, {"shift": 1e3}, {"of_x": 1e4}, {"of_x": 1e-4}, {"weight": 1e4}
    for change in changes:
        found, other = predicted(panel, loss, **change)
        np.testing.assert_allclose(found, expected, **digits)
        units = change.get("of_y", 1.0) / change.get("of_x", 1.0)
        np.testing.assert_allclose(other.prior_.deviation, units * model.prior_.deviation, rtol=2e-2)


def test_an_own_loss_may_be_in_any_units_and_have_any_level(panel):
    X, y, _ = panel
    expected, model = predicted(panel, expectile)
    for size, level in ((1e4, 0.0), (1e-4, 0.0), (1.0, 100.0)):
        found, other = predicted(panel, lambda a, t, s=size, c=level: s * expectile(a, t) + c)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        np.testing.assert_allclose(other.history_, size * model.history_ + level, rtol=1e-3)
        new = (one.adapt(X[:3], y[:3]).predict(X[3:6]) for one in (model, other))
        np.testing.assert_allclose(*new, atol=1e-4)


def test_the_squared_loss_as_a_function_has_the_units_of_standardised_targets(panel):
    _, y, _ = panel
    loss = regression_loss(lambda found, target: 3 * (found - target) ** 2, 0.5, 1.0)
    units = units_of(loss, y, np.ones(len(y)), 0, constant=True)
    np.testing.assert_allclose(units, [y.mean(), y.std(), 3 * y.var(), 6 * y.var()], rtol=1e-6)


def test_an_own_loss_with_a_link_has_predictions_of_its_own():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(60), 15)
    X = random.normal(size=(900, 1))
    eta = 2.0 + 0.5 * X[:, 0] + 0.5 * random.normal(size=60)[of]
    y = random.poisson(np.exp(eta)).astype(float)
    own = GroupedRegressor(loss=lambda found, count: jnp.exp(found) - count * found, random_state=0)
    theirs = GroupedRegressor(loss="poisson", random_state=0).fit(X, y, groups=of)
    found = np.exp(own.fit(X, y, groups=of).predict(X, groups=of))
    np.testing.assert_allclose(found, theirs.predict(X, groups=of), rtol=0.05)
    np.testing.assert_allclose(own.prior_.covariance, theirs.prior_.covariance, atol=0.03)


def test_classes_may_have_an_own_loss_in_any_units(panel):
    X, y, of = panel
    label = np.where(y > 3, "high", "low")

    def fitted(loss):
        model = GroupedClassifier(loss=loss, prior="diagonal", random_state=0).fit(X, label, groups=of)
        return model.predict_proba(X, groups=of)[:, 0]

    def own(size):
        return lambda eta, code: size * (jnp.logaddexp(0.0, eta) - code * eta)

    once, large, small = (fitted(own(size)) for size in (1.0, 1e4, 1e-4))
    np.testing.assert_allclose(large, once, atol=1e-4)
    np.testing.assert_allclose(small, once, atol=1e-4)
    np.testing.assert_allclose(once, fitted("logistic"), atol=0.03)  # learning ends elsewhere on the way


def test_a_constant_feature_has_no_say_where_it_differs_later(panel, tmp_path):
    X, y, of = panel
    both = np.column_stack([X, np.full(len(y), 0.1)])
    settings = {"prior": "diagonal", "max_iter": 5, "random_state": 0}
    model = GroupedRegressor(**settings).fit(both, y, groups=of)
    model.save(tmp_path / "model.npz")
    again = GroupedRegressor.load(tmp_path / "model.npz")
    later = np.column_stack([X, np.full(len(y), 7.0)])
    assert model.prior_.deviation[-1] == model.prior_.coef[-1] == 0
    for one in (model, again):
        for groups in (of, None):
            np.testing.assert_allclose(one.predict(later, groups=groups), one.predict(both, groups=groups))
            np.testing.assert_allclose(
                one.predict_interval(later, groups=groups), one.predict_interval(both, groups=groups)
            )
        assert (one.coef_[:, -1] == 0).all()


@pytest.mark.parametrize("kind", [GroupedRegressor, PartialAUCClassifier, ReweightedClassifier])
def test_a_generator_as_random_state_is_refused_with_the_way_out(panel, kind):
    X, y, _ = panel
    clean = (X[:20], y[:20] > 3) if kind is ReweightedClassifier else ()
    with pytest.raises(ValueError, match=r"RandomState or None, .* random_state=int\(generator.integers"):
        kind(random_state=np.random.default_rng(0)).fit(X, y > 3, *clean)
    with pytest.raises(ValueError, match=r"random_state must be a whole number from 0 .* got 'seed'$"):
        kind(random_state="seed").fit(X, y > 3, *clean)
