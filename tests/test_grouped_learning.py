"""How priors of grouped data are learnt: variables relative to the start, systems in tiles, and steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor, block_systems, learning
from bilevax.applications.grouped.coordinates import Coordinates
from bilevax.applications.grouped.losses import pinball, regression_loss
from bilevax.applications.grouped.panel import Panel
from bilevax.applications.grouped.priors import FORMS, Prior
from bilevax.applications.grouped.regressor import within_groups
from bilevax.applications.grouped.steps import Steps, few_values, find_steps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("known", "columns"), [(0, 1), (2, 3)])
def test_variables_relative_to_the_start_have_the_gradient_of_x(form, known, columns):
    random = np.random.default_rng(0)
    prior = Prior(form, 4, columns, 2 if form == "low_rank" else 0, known)
    half = random.normal(size=(4, 4))
    start = prior.start_at(
        random.normal(size=(4, columns)), random.normal(size=(known, 4, columns)), half @ half.T
    )
    table = random.normal(size=(50, known)) @ (np.eye(known) + 0.9 * (1 - np.eye(known)))
    coordinates = Coordinates(prior, start, table)
    flat = coordinates.of(start)
    for name, one in coordinates.x(flat).items():
        np.testing.assert_allclose(one, start[name], atol=1e-12)
    low, high = coordinates.bounds
    assert (low < flat).all()
    assert (flat < high).all()
    flat = flat + 0.1 * random.normal(size=flat.shape)
    x = coordinates.x(flat)
    np.testing.assert_allclose(coordinates.of(x), flat, atol=1e-12)
    slope = {name: random.normal(size=np.shape(one)) for name, one in x.items()}

    def value(at):
        return sum((slope[name] * one).sum() for name, one in coordinates.x(at).items())

    numbers = [(value(flat + 1e-6 * one) - value(flat - 1e-6 * one)) / 2e-6 for one in np.eye(len(flat))]
    np.testing.assert_allclose(coordinates.gradient(flat, x, slope), numbers, atol=1e-6)


def test_a_prior_with_metadata_and_correlations_is_learnt_to_the_end():
    # Coefficients vary a thousand times more along some directions than along others.
    random = np.random.default_rng(0)
    groups, size = 150, 6
    mix = random.normal(size=(size, size)) * np.geomspace(1, 0.03, size)
    table = random.normal(size=(groups, 3))
    beta = table @ random.normal(size=(3, size)) + random.normal(size=(groups, size)) @ mix.T
    of = np.repeat(np.arange(groups), 12)
    X = random.normal(size=(len(of), size))
    y = (X * beta[of]).sum(1) + random.normal(size=len(of))
    metadata = dict(enumerate(table))
    usual, longer = (
        GroupedRegressor(prior="full", random_state=0, tol=tol, max_iter=2_000).fit(
            X, y, groups=of, metadata=metadata
        )
        for tol in (1e-5, 1e-9)
    )
    assert usual.history_[-1] - longer.history_[-1] < 1e-3 * longer.history_[-1]
    assert usual.n_iter_ < 80


@pytest.mark.parametrize("accelerator", [False, True])
def test_systems_in_tiles_are_those_of_numpy(accelerator, monkeypatch):
    monkeypatch.setattr(block_systems, "on_accelerator", lambda: accelerator)
    random, d, count = np.random.default_rng(0), 3, 64
    monkeypatch.setattr(block_systems, "_TILE", 2 * (d + 1) ** 2)
    half = random.normal(size=(count, 9, d + 1))
    total = np.einsum("bnd,bne->bde", half, half)
    known, P = random.normal(size=(count, 2)), np.diag([1.0, 2.0, 3.0])
    centre, slopes = random.normal(size=d), random.normal(size=(2, d))
    with jax.enable_x64(True):
        tiles = [jnp.asarray(block_systems.tiled(one, d + 1)) for one in (total, known)]
        assert len(tiles[0]) == (1 if accelerator else 4)
        np.testing.assert_array_equal(block_systems.untiled(tiles[0]), total)
        coef, _, variance = block_systems.fit(*tiles, P, centre, slopes, np.ones(d), True)
        logs = block_systems.inverses(jnp.moveaxis(jnp.asarray(total[:, :d, :d]), 0, -1))[1]
    inverse = np.linalg.inv(total[:, :d, :d] + P)
    right = total[:, :d, d] + (centre + known @ slopes) @ P
    np.testing.assert_allclose(block_systems.untiled(variance), inverse, rtol=1e-9)
    np.testing.assert_allclose(
        block_systems.untiled(coef), np.einsum("bde,be->bd", inverse, right), rtol=1e-9
    )
    np.testing.assert_allclose(logs, np.linalg.slogdet(total[:, :d, :d])[1], rtol=1e-9)


def test_thresholds_of_steps_are_the_best_ones():
    random = np.random.default_rng(0)
    eta = random.normal(size=60)
    target, weight = np.clip(np.round(eta + random.normal(size=60)), -1, 1), random.uniform(0.5, 2, 60)

    def loss(found, target):
        return pinball(target - found, 0.7)

    steps = find_steps(np.array([-1.0, 0.0, 1.0]), eta, target, weight, loss, seed=0)
    assert steps is not None
    places = np.concatenate([[-np.inf], np.sort(eta) + 1e-9])
    best = min(
        weight @ loss(Steps(steps.values, np.array([a, b]))(eta), target)
        for a in places
        for b in places[places >= a]
    )
    np.testing.assert_allclose(weight @ loss(steps(eta), target), best)


def test_steps_are_left_out_where_targets_have_many_values_or_steps_do_not_help():
    random = np.random.default_rng(0)
    assert few_values(random.normal(size=5_000)) is None
    assert few_values(np.ones(100)) is None
    assert few_values(np.arange(30.0)) is None  # a row for each does not tell where one is better
    target = random.integers(2, size=400).astype(float)
    assert few_values(target).tolist() == [0.0, 1.0]

    def squared(found, target):
        return (found - target) ** 2

    assert find_steps(np.array([0.0, 1.0]), np.full(400, 0.5), target, np.ones(400), squared, seed=0) is None


@pytest.fixture(scope="module")
def ratings():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(60), 12)
    X = random.normal(size=(720, 2))
    eta = 3 + (X * (np.array([1.0, -0.5]) + 0.5 * random.normal(size=(60, 2)))[of]).sum(1)
    y = np.clip(np.round(eta + 0.5 * random.normal(size=720)), 1, 5)
    model = GroupedRegressor(loss="quantile", quantile=0.8, prior="ridge", random_state=0)
    return model.fit(X, y, groups=of), X, y, of


def test_quantiles_of_ratings_are_ratings_and_better_than_linear_ones(ratings):
    model, X, y, of = ratings
    found, new = model.predict(X, groups=of), model.predict(X)
    assert set(np.unique(found)) | set(np.unique(new)) <= {1.0, 2.0, 3.0, 4.0, 5.0}
    linear = (X * model.coef_[of]).sum(1) + model.intercept_[of]
    assert pinball(y - found, 0.8).mean() < 0.9 * pinball(y - linear, 0.8).mean()
    assert (np.diff(found[np.argsort(linear)]) >= 0).all()


def test_steps_are_saved_with_the_model(ratings, tmp_path):
    model, X, y, of = ratings
    model.save(tmp_path / "model.npz")
    loaded = GroupedRegressor.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(loaded.predict(X, groups=of), model.predict(X, groups=of))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    adapted, other = (one.adapt(X[:5], y[:5]).predict(X) for one in (loaded, model))
    np.testing.assert_array_equal(adapted, other)


def test_large_counts_are_fitted_as_well_as_small_ones():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(40), 10)
    X = random.normal(size=(400, 2))
    eta = (X * (np.array([0.5, -0.3]) + 0.3 * random.normal(size=(40, 2)))[of]).sum(1)
    errors = []
    for level in (10.0, 1e4):
        model = GroupedRegressor(loss="poisson", prior="ridge", random_state=0)
        model.fit(X, random.poisson(level * np.exp(eta)), groups=of)
        found = model.predict(X, groups=of)
        errors.append(np.sqrt(np.mean((np.log(found / level) - eta) ** 2)))
        by_hand = (X * model.coef_[of]).sum(1) + model.intercept_[of]
        np.testing.assert_allclose(np.exp(by_hand), found, rtol=1e-6)
    assert errors[0] < 0.25
    assert errors[1] < 0.1 * errors[0]


def test_the_poisson_loss_is_the_likelihood_up_to_a_constant_of_the_count():
    loss = regression_loss("poisson", 0.5, 1.0)
    eta = np.linspace(-3, 3, 7)
    for count in (0.0, 1.0, 7.0):
        found = np.array([float(loss.row(jnp.asarray([one]), jnp.asarray(count))) for one in eta])
        expected = np.exp(eta) - count * eta
        np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=1e-4, atol=1e-4)


def test_the_spread_within_groups_does_not_see_wrong_targets_or_levels_of_groups():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(100), 8)
    X = random.normal(size=(800, 2))
    target = X @ [3.0, 1.0] + 50 * random.normal(size=100)[of] + 2.0 * random.normal(size=800)
    target[::20] += 1e6
    rows = np.concatenate([np.ones((800, 1)), X], 1)
    offsets = np.arange(0, 801, 8)
    found = within_groups(Panel(rows, target, np.ones(800), offsets, np.zeros((100, 0))))
    assert 1.6 < found < 2.8


def test_a_part_of_the_groups_is_learnt_from_no_further_than_it_tells(monkeypatch):
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(120), 5)
    X = random.normal(size=(600, 1))
    y = X[:, 0] + random.normal(size=120)[of] + random.logistic(size=600) > 0
    seen, descend = [], learning._Way.descend

    def noted(way, judge, tol):
        seen.append((judge.blocks.count, tol))
        descend(way, judge, tol)

    monkeypatch.setattr(learning, "enough", lambda prior, groups: 20)
    monkeypatch.setattr(learning._Way, "descend", noted)
    GroupedClassifier(prior="ridge", tol=1e-3, max_iter=1, random_state=0).fit(X, y, groups=of)
    (few, of_part), (whole, of_all) = seen
    assert of_all == 1e-3
    assert few < whole / 5
    assert of_part == pytest.approx(of_all * whole / few)
