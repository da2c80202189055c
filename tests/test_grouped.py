"""GroupedRegressor and GroupedClassifier: the prior is the best one, groups are solved, input is checked."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import SkipTest

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy import sparse
from scipy.optimize import minimize
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import bilevax as bx
from bilevax.applications.grouped import (
    GroupedClassifier,
    GroupedRegressor,
    base,
    closed_form,
    device_sums,
    learning,
    make_problem,
    sums,
    tiles,
)
from bilevax.applications.grouped.blocks import folds_of, whole_groups
from bilevax.applications.grouped.closed_form import Evidence, SquaredCrossValidation
from bilevax.applications.grouped.descent import Descent, Point
from bilevax.applications.grouped.group_index import GroupIndex
from bilevax.applications.grouped.learning import cross_validation, fit_groups, held_out_errors
from bilevax.applications.grouped.losses import classification_loss, pinball, regression_loss
from bilevax.applications.grouped.newton import CrossValidation, fit_tiles
from bilevax.applications.grouped.panel import Panel, Scaling
from bilevax.applications.grouped.priors import FORMS, Prior
from bilevax.applications.grouped.small_systems import solve
from bilevax.applications.grouped.start import Parabolas, random_effects
from bilevax.applications.grouped.tiles import chunks


@pytest.fixture
def doubles():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def small_panel(lengths=(2, 3, 40, 5, 7), features=2, known=0, seed=0):
    random = np.random.default_rng(seed)
    n = sum(lengths)
    rows = np.concatenate([np.ones((n, 1)), random.normal(size=(n, features))], 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    target = random.normal(size=n) + rows[:, 1]
    return Panel(rows, target, random.uniform(0.5, 2, n), offsets, random.normal(size=(len(lengths), known)))


def some_x(prior, seed=0):
    random = np.random.default_rng(seed)
    start = prior.start(np.zeros((prior.size, prior.columns)), 0.5)
    return {name: one + 0.3 * random.normal(size=one.shape) for name, one in start.items()}


CASES = {
    "squared, full": (regression_loss("squared", 0.5, 1.0), "full", 0),
    "squared, ridge, metadata": (regression_loss("squared", 0.5, 1.0), "ridge", 2),
    "huber, low rank": (regression_loss("huber", 0.5, 0.7), "low_rank", 0),
    "quantile, diagonal": (regression_loss("quantile", 0.9, 0.2), "diagonal", 0),
    "poisson, diagonal": (regression_loss("poisson", 0.5, 1.0), "diagonal", 0),
    "three classes, full": (classification_loss("logistic", 3), "full", 0),
}


@pytest.mark.parametrize(("name", "judge"), [("squared, full", "rows"), ("three classes, full", "groups")])
def test_the_loss_and_its_gradient_are_those_of_the_bilevel_problem(name, judge, doubles):
    loss, form, known = CASES[name]
    panel = small_panel(known=known)
    if loss.columns > 1:
        target = np.random.default_rng(1).integers(0, 3, len(panel.target)).astype(float)
        panel = dataclasses.replace(panel, target=target)
    prior = Prior(form, 3, loss.columns, 2 if form == "low_rank" else 0, known)
    x, blocks = some_x(prior), folds_of(panel, 3, 0, judge=judge)
    value, gradient = cross_validation(blocks, prior, loss).value_and_gradient(x)
    problem = make_problem(panel, prior, loss, folds=3, judge=judge, seed=0)
    y0 = jnp.zeros((problem.count, prior.width, prior.columns))
    exact = bx.value_and_hypergradient(problem, jax.tree.map(jnp.asarray, x), y0)
    assert value == pytest.approx(float(exact.value), rel=1e-8)
    for key in x:
        np.testing.assert_allclose(gradient[key], exact.gradient[key], atol=1e-7)


@pytest.mark.parametrize(
    "name", ["squared, ridge, metadata", "huber, low rank", "quantile, diagonal", "poisson, diagonal"]
)
def test_the_gradient_is_that_of_differences_and_groups_are_minimisers(name, doubles):
    loss, form, known = CASES[name]
    panel = small_panel(lengths=(1, 4, 30), known=known)
    if name.startswith("poisson"):
        panel = dataclasses.replace(panel, target=np.abs(panel.target).round())
    prior = Prior(form, 3, 1, 2 if form == "low_rank" else 0, known)
    x, blocks = some_x(prior), folds_of(panel, 3, 0, judge="groups", newcomers=0.3)
    judge = cross_validation(blocks, prior, loss)
    _, gradient = judge.value_and_gradient(x)
    for key, step in (("scale", 0), ("mean", (1, 0))):
        moved = {n: one.copy() for n, one in x.items()}
        moved[key][step] += 1e-5
        ahead, _ = judge.value_and_gradient(moved)
        moved[key][step] -= 2e-5
        behind, _ = judge.value_and_gradient(moved)
        assert gradient[key][step] == pytest.approx((ahead - behind) / 2e-5, abs=1e-6)

    fits, spread = fit_groups(panel, prior, loss, x), np.asarray(prior.spread(x))
    rows = panel.X[panel.offsets[2] :]
    target, weight = panel.target[panel.offsets[2] :], panel.weight[panel.offsets[2] :]
    mean = np.asarray(prior.mean(x, panel.known[2]))[:, 0]

    def g(w):
        values = jax.vmap(loss.row)(jnp.asarray(rows @ (mean + spread @ w))[:, None], jnp.asarray(target))
        return float(weight @ np.asarray(values) + 0.5 * w @ w)

    found = np.linalg.pinv(spread) @ (fits.coef[2, :, 0] - mean)  # of least norm, as the minimiser is
    assert g(found) <= minimize(g, found, method="Nelder-Mead", options={"xatol": 1e-9}).fun + 1e-9


@pytest.mark.parametrize(("form", "known"), [("full", 0), ("diagonal", 2), ("low_rank", 0)])
def test_the_evidence_is_the_likelihood_of_the_random_effects_model(form, known, doubles):
    panel = dataclasses.replace(small_panel(lengths=(1, 2, 5, 9), known=known), weight=np.ones(17))
    prior = Prior(form, 3, 1, 2 if form == "low_rank" else 0, known)
    x, evidence = some_x(prior), Evidence(prior, sums.group_sums(panel), panel.known, 0.5)
    value, gradient = evidence.value_and_gradient(x)
    spread = prior.matrix(x)
    left, logarithm = 0.0, 0.0
    for i in range(panel.groups):
        rows, target = (one[panel.offsets[i] : panel.offsets[i + 1]] for one in (panel.X, panel.target))
        off = target - rows @ np.asarray(prior.mean(x, panel.known[i]))[:, 0]
        covariance = np.eye(len(rows)) + rows @ spread @ spread.T @ rows.T  # at noise of variance one
        left += off @ np.linalg.solve(covariance, off)
        logarithm += np.linalg.slogdet(covariance)[1]
    n = len(panel.target)
    best = -0.5 * (n * np.log(2 * np.pi * left / n) + logarithm + n)  # the log-likelihood at the best noise
    assert 0.5 * np.exp(-2 * best / n - 1 - np.log(2 * np.pi)) == pytest.approx(value, rel=1e-10)
    for key, one in x.items():
        for place in np.ndindex(one.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = {n: one.copy() for n, one in x.items()}
                moved[key][place] += step
                ends.append(evidence.value_and_gradient(moved)[0])
            assert gradient[key][place] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


def test_groups_are_the_same_with_sums_made_on_the_device(monkeypatch):
    X, y, of, _ = generated(groups=60)
    model = GroupedRegressor(prior="diagonal", random_state=0, max_iter=3)
    mixed = np.random.default_rng(0).permutation(len(y))  # rows are not by group
    expected = model.fit(X, y, groups=of).adapt(X[mixed], y[mixed], groups=of[mixed]).coef_
    monkeypatch.setattr(closed_form, "on_accelerator", lambda: True)
    monkeypatch.setattr(device_sums, "_ENTRIES", 16 * 50)  # and groups are cut
    found = model.adapt(X[mixed].astype(np.float32), y[mixed], groups=of[mixed]).coef_
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_all_groups_are_in_the_evidence_and_some_of_them_in_folds(monkeypatch):
    X, y, of, _ = generated(groups=100)
    seen = []
    monkeypatch.setattr(learning, "_FOLDED", 5)
    monkeypatch.setattr(learning, "_FOLDED_ROWS", 1)

    before = learning._with_evidence

    def noted(*given):
        out = before(*given)
        seen.append((out.blocks.panel.groups, out.evidence.groups))
        return out

    monkeypatch.setattr(learning, "_with_evidence", noted)
    whole = GroupedRegressor(prior="ridge", random_state=0, max_iter=20).fit(X, y, groups=of)
    assert seen == [(5 * (X.shape[1] + 3), 100)]
    assert len(whole.coef_) == 100
    with pytest.raises(ValueError, match="evidence must be a number from 0 to 1, got 1"):
        GroupedRegressor(evidence=1).fit(X, y, groups=of)


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_squares_give_what_newton_steps_on_rows_give(form, doubles):
    panel, loss = small_panel(lengths=(1, 2, 100, 17, 4), known=2), CASES["squared, full"][0]
    prior = Prior(form, 3, 1, 2 if form == "low_rank" else 0, 2)
    x, blocks = some_x(prior), folds_of(panel, 4, 0, judge="groups", newcomers=0.3)
    value, gradient = cross_validation(blocks, prior, loss).value_and_gradient(x)
    slowly, expected = CrossValidation(blocks, prior, loss).value_and_gradient(x)
    assert value == pytest.approx(slowly, rel=1e-9)
    for name in x:
        np.testing.assert_allclose(gradient[name], expected[name], atol=1e-9)
    fits = fit_groups(panel, prior, loss, x, variance=True)
    coef, share, variance, unsolved = fit_tiles(panel, prior, loss, x, variance=True)
    assert unsolved == 0
    np.testing.assert_allclose(fits.coef, coef, atol=1e-9)
    np.testing.assert_allclose(fits.share, share, atol=1e-9)
    np.testing.assert_allclose(fits.variance, variance, atol=1e-9)
    ours, theirs = (
        held_out_errors(kind(blocks, prior, *more), x, 9, 0)
        for kind, more in ((SquaredCrossValidation, ()), (CrossValidation, (loss,)))
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.sort(one), np.sort(other), atol=1e-9)
    assert ours[1].sum() == pytest.approx(panel.weight.sum())  # every row is held out once


def test_tiles_hold_the_rows_of_every_block():
    panel = small_panel(lengths=(1, 2, 100, 17))
    blocks = folds_of(panel, 4, 0)
    assert blocks.group.tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0]
    (chunk,) = chunks(blocks)
    assert chunk.blocks.tolist() == [10, *range(10)]  # by group
    of, weight = chunk.blocks[chunk.data["of"]], np.asarray(chunk.data["a"], float).sum(1)
    kept = [weight[of == block].sum() for block in range(blocks.count)]
    total = np.add.reduceat(panel.weight, panel.offsets[:-1])
    held = np.bincount(blocks.group, total[blocks.group] - kept)
    np.testing.assert_allclose(held, total, rtol=1e-5)  # every row is held out once
    (everything,) = chunks(whole_groups(panel))
    assert float(everything.data["a"].sum()) == pytest.approx(panel.weight.sum(), rel=1e-5)


def test_tiles_are_the_same_when_their_rows_are_made_on_the_device(monkeypatch):
    random = np.random.default_rng(0)
    X, of = 1e4 + random.normal(size=(70, 2)), random.integers(0, 6, 70)
    scaling = Scaling.of(X, X[:, 0], np.ones(70), targets=True)
    scaled = Panel.by_group(X, X[:, 0], random.uniform(0.5, 2, 70), of, np.zeros((6, 0)), scaling)
    for panel in (scaled, small_panel(lengths=(1, 2, 100, 17))):
        blocks = folds_of(panel, 4, 0, newcomers=0.2)
        (expected,) = chunks(blocks)
        monkeypatch.setattr(tiles, "on_accelerator", lambda: True)
        (found,) = chunks(blocks)
        monkeypatch.undo()
        for rows, weight in (("X", "a"), ("Xh", "h")):
            np.testing.assert_array_equal(found.data[weight], expected.data[weight])
            real = np.asarray(expected.data[weight]) > 0
            assert found.data[rows].dtype == expected.data[rows].dtype
            ours, theirs = (np.swapaxes(one.data[rows], 1, 2)[real] for one in (found, expected))
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("judge", ["groups", "rows"])
def test_groups_or_rows_count_alike_and_newcomers_have_their_share(judge):
    panel = small_panel(lengths=(1, 2, 100, 17))
    blocks = folds_of(panel, 4, 0, judge=judge, newcomers=0.25)
    (chunk,) = chunks(blocks)
    of, weight = chunk.blocks[chunk.data["ofh"]], np.asarray(chunk.data["h"], float).sum(1)
    judged = np.array([weight[of == block].sum() for block in range(blocks.count)])
    assert judged.sum() == pytest.approx(1.0, rel=1e-5)
    assert judged[blocks.folds :].sum() == pytest.approx(0.25, rel=1e-5)
    by_group = np.bincount(blocks.group[: blocks.folds], judged[: blocks.folds])
    total = np.add.reduceat(panel.weight, panel.offsets[:-1])
    expected = np.full(4, 0.25) if judge == "groups" else total / total.sum()
    np.testing.assert_allclose(by_group, 0.75 * expected, rtol=1e-5)
    # A newcomer is judged on other rows than it is fitted to.
    for block in range(blocks.folds, blocks.count):
        both = [p.tiled(np.array([block])) for p in (blocks.kept, blocks.held)]
        kept, held = (set(place[real].tolist()) for _, place, real in both)
        assert held
        assert not kept & held


def test_rows_are_standardised_where_they_are_whatever_their_order():
    random = np.random.default_rng(0)
    X, target, codes = random.normal(3, 2, (30, 2)), random.normal(size=30), random.integers(0, 4, 30)
    weight = random.uniform(0.5, 2, 30)
    scaling = Scaling.of(X.astype(np.float32), target, weight, targets=True)
    panel = Panel.by_group(X.astype(np.float32), target, weight, codes, np.zeros((4, 0)), scaling)
    assert panel.X.dtype == np.float32  # not copied
    rows = panel.all()
    np.testing.assert_allclose(panel.weight @ rows[:, 1:], 0, atol=1e-5)
    np.testing.assert_allclose(panel.weight @ rows[:, 1:] ** 2, weight.sum(), rtol=1e-5)
    some = panel.part(np.array([1, 3]))
    np.testing.assert_array_equal(some.all(), rows[np.isin(np.sort(codes), [1, 3])])


def test_the_start_is_the_random_effects_model_that_rows_were_drawn_from(doubles):
    random = np.random.default_rng(0)
    groups, factor = 800, np.array([[0.8, 0.0], [0.5, 0.4]])
    beta = np.array([0.5, -1.0]) + random.normal(size=(groups, 2)) @ factor.T
    rows = np.concatenate([np.ones((groups * 20, 1)), random.normal(size=(groups * 20, 1))], 1)
    eta = (rows * beta.repeat(20, 0)).sum(1)
    target, known = eta + 0.5 * random.normal(size=len(eta)), np.zeros((groups, 0))
    panel = Panel(rows, target, np.ones(len(eta)), np.arange(groups + 1) * 20, known)
    prior, loss = Prior("full", 2), CASES["squared, full"][0]
    mean, _, found = random_effects(Parabolas.of(panel, loss, np.zeros((2, 1)), 1.0), prior, np.zeros((2, 1)))
    same = random_effects(Parabolas.of_sums(sums.group_sums(panel), known), prior, np.zeros((2, 1)))
    np.testing.assert_allclose(same[2], found)
    np.testing.assert_allclose(mean[:, 0], [0.5, -1.0], atol=0.08)
    np.testing.assert_allclose(found, factor @ factor.T / 0.25, rtol=0.2)
    x = prior.start_at(mean, np.zeros((0, 2, 1)), found)
    np.testing.assert_allclose(prior.matrix(x) @ prior.matrix(x).T, found, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_prior_as_numbers_is_that_of_the_device_and_its_penalty_has_its_gradient(form, doubles):
    prior = Prior(form, 4, 2, 2 if form == "low_rank" else 0, 3)
    x = some_x(prior)
    np.testing.assert_allclose(prior.matrix(x), prior.spread(x), rtol=1e-12)
    value, slope = prior.penalty(x)
    for name, one in x.items():
        for place in np.ndindex(one.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = {n: o.copy() for n, o in x.items()}
                moved[name][place] += step
                ends.append(prior.penalty(moved)[0])
            assert slope[name][place] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-8)
    assert value > 0


def test_steps_reach_a_minimum_within_bounds_and_remember_its_curvature():
    random = np.random.default_rng(0)
    half = random.normal(size=(12, 12))
    matrix, centre = half @ half.T + 0.01 * np.eye(12), random.normal(size=12)
    calls = []

    def evaluate(at):
        calls.append(at)
        left = at - centre
        bend = np.cosh(0.3 * left).sum()
        return 0.5 * left @ matrix @ left + bend, matrix @ left + 0.3 * np.sinh(0.3 * left)

    high = np.full(12, np.inf)
    high[3] = centre[3] - 1.0
    descent = Descent(np.full(12, -np.inf), high)
    steps = []
    settings = {"most": 200, "tol": 1e-12, "after_step": lambda here: steps.append(here.value)}
    inside = np.minimum(high, 0.0)
    found = descent.run(evaluate, Point(inside, *evaluate(inside)), **settings)
    best = minimize(evaluate, inside, jac=True, method="L-BFGS-B", bounds=[(None, h) for h in high])
    assert found.value <= best.fun + 1e-7
    assert found.at[3] == high[3]
    assert (np.diff(steps) < 0).all()
    start, needed = np.minimum(found.at + 0.3 * random.normal(size=12), high), []
    taught = Descent(descent.low, high)
    taught.run(evaluate, Point(inside, *evaluate(inside)), **settings | {"tol": 1e-3})
    for one in (taught, Descent(descent.low, high)):  # with a memory and without
        calls.clear()
        again = one.run(evaluate, Point(start, *evaluate(start)), **settings | {"tol": 1e-8})
        assert again.value == pytest.approx(found.value, abs=1e-6)
        needed.append(len(calls))
    assert needed[0] < needed[1]


def test_a_value_that_is_not_finite_makes_steps_shorter():
    def evaluate(at):
        return (float(at[0] - np.log(at[0])), 1 - 1 / at) if at[0] > 0 else (np.nan, at * np.nan)

    descent = Descent(np.array([-np.inf]), np.array([np.inf]))
    start = Point(np.array([0.01]), *evaluate(np.array([0.01])))
    found = descent.run(evaluate, start, most=100, tol=1e-12, after_step=lambda here: None)
    assert found.at[0] == pytest.approx(1.0, abs=1e-4)


def test_every_form_starts_near_a_covariance():
    half = np.random.default_rng(0).normal(size=(5, 5))
    covariance = half @ half.T + 0.1 * np.eye(5)
    found = {}
    for form in FORMS:
        prior = Prior(form, 5, rank=2 if form == "low_rank" else 0)
        spread = prior.matrix(prior.start_at(np.zeros((5, 1)), np.zeros((0, 5, 1)), covariance))
        found[form] = spread @ spread.T
    np.testing.assert_allclose(found["full"], covariance, rtol=1e-4)
    np.testing.assert_allclose(found["diagonal"], np.diag(np.diag(covariance)), rtol=1e-4)
    assert len(np.unique(np.diag(found["ridge"])[1:].round(5))) == 1
    off = [np.linalg.norm(found[form] - covariance) for form in ("diagonal", "low_rank", "full")]
    assert off[0] > off[1] > off[2]


def test_sums_of_many_rows_are_made_in_pieces(monkeypatch):
    panel = small_panel(lengths=(1, 40, 3, 100))
    blocks = folds_of(panel, 3, 0, newcomers=0.2)
    whole = sums.BlockSums.of(blocks)
    monkeypatch.setattr(sums, "_ROWS", 7)  # groups are cut too
    cut = sums.BlockSums.of(blocks)
    for name in ("kept", "held", "total"):
        np.testing.assert_allclose(getattr(cut, name), getattr(whole, name), atol=1e-10)
    np.testing.assert_allclose(cut.total, sums.group_sums(panel), atol=1e-10)
    rows = np.concatenate([panel.X, panel.target[:, None]], 1)[41:44]
    weighted = rows.T @ (rows * panel.weight[41:44, None])
    mine = np.flatnonzero(blocks.group[: blocks.folds] == 2)
    for block in mine:
        np.testing.assert_allclose(cut.kept[block] + cut.held[block], weighted, atol=1e-10)
    for block in range(blocks.folds, blocks.count):  # newcomers
        for places, found in ((blocks.kept, cut.kept), (blocks.held, cut.held)):
            _, place, real = places.tiled(np.array([block]))
            own = np.concatenate([blocks.panel.at(place[real]), blocks.panel.target[place[real], None]], 1)
            np.testing.assert_allclose(
                found[block], own.T @ (own * blocks.panel.weight[place[real], None]), atol=1e-10
            )


@pytest.mark.parametrize(
    "groups",
    [
        np.array([3, 1, 3, 2]),
        np.array([1, 1, 2, 3]),
        np.array(["b", "a", "b", "c"]),
        np.array([0.5, -1.0, 0.5, 2.0]),
        np.array([True, False, True, True]),
    ],
)
def test_groups_in_arrays_are_coded_as_those_in_lists(groups):
    fast, slow = GroupIndex.of(groups, 4), GroupIndex.of(groups.tolist(), 4)
    assert list(fast.place) == list(slow.place)
    others = np.array([groups[1], groups[0], groups[3]])
    assert fast.codes(others, 3).tolist() == slow.codes(others.tolist(), 3).tolist()
    few = GroupIndex(groups.tolist()[:1])  # groups that are not known
    assert few.codes(groups, 4).tolist() == few.codes(groups.tolist(), 4).tolist()
    assert -1 in few.codes(groups, 4)


# --- the estimators --------------------------------------------------------------


def generated(groups=150, rows=12, seed=0):
    random = np.random.default_rng(seed)
    of = np.repeat(np.arange(groups), random.integers(2, rows, groups))
    X = random.normal(size=(len(of), 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, -1.0]
    slopes = np.array([1.0, -0.2, 3.0]) + random.normal(size=(groups, 3)) * [0.5, 0.0, 2.0]
    y = (X * slopes[of]).sum(1) + random.normal(size=groups)[of] + 0.5 * random.normal(size=len(of))
    return X, y, of, slopes


@pytest.fixture(scope="module")
def fitted():
    X, y, of, slopes = generated()
    train = np.arange(len(y)) % 4 > 0
    model = GroupedRegressor(prior="diagonal", random_state=0)
    model.fit(X[train], y[train], groups=[f"g{one}" for one in of[train]])
    return model, X, y, of, slopes, train


def names(of):
    return [f"g{one}" for one in of]


def test_the_prior_of_generated_groups_is_found_in_their_own_units(fitted):
    model, _, _, _, slopes, _ = fitted
    assert (np.abs(model.prior_.coef - slopes.mean(0)) < [0.15, 0.02, 0.9]).all()
    assert model.prior_.deviation[0] == pytest.approx(0.5, abs=0.2)
    assert model.prior_.deviation[1] < 0.03
    assert 0 <= model.shrinkage_.min() < model.shrinkage_.max() < 1
    assert model.groups_[0] == "g0"
    assert model.coef_.shape == (150, 3)
    assert np.diff(model.history_).max() <= 1e-6


def test_predictions_beat_the_pooled_model_and_own_models(fitted):
    model, X, y, of, _, train = fitted
    A = np.column_stack([np.ones(len(y)), X])
    pooled = A @ np.linalg.lstsq(A[train], y[train], rcond=None)[0]
    error = np.mean((model.predict(X[~train], groups=names(of[~train])) - y[~train]) ** 2)
    assert error < 0.5 * np.mean((pooled - y)[~train] ** 2)
    own = [
        np.sum(
            (
                A[rows & ~train] @ np.linalg.lstsq(A[rows & train], y[rows & train], rcond=None)[0]
                - y[rows & ~train]
            )
            ** 2
        )
        for rows in (of == one for one in range(150))
        if (rows & train).any()
    ]
    assert error < np.sum(own) / (~train).sum()


def test_a_prediction_is_the_row_times_the_coefficients_and_new_groups_have_the_prior(fitted):
    model, X, _, of, _, _ = fitted
    expected = (X[:5] * model.coef_[[model.groups_.tolist().index(f"g{o}") for o in of[:5]]]).sum(1)
    expected += model.intercept_[[model.groups_.tolist().index(f"g{o}") for o in of[:5]]]
    np.testing.assert_allclose(model.predict(X[:5], groups=names(of[:5])), expected, atol=1e-4)
    prior = X[:5] @ model.prior_.coef + model.prior_.intercept
    np.testing.assert_allclose(model.predict(X[:5], groups=["new"] * 5), prior, atol=1e-4)
    np.testing.assert_allclose(model.predict(X[:5]), prior, atol=1e-4)
    model.set_params(unseen="error")
    with pytest.raises(ValueError, match=r"groups must be known.*got 'new' in row 1"):
        model.predict(X[:2], groups=["g0", "new"])
    model.set_params(unseen="prior")


def test_intervals_hold_their_share_of_unseen_rows_of_known_and_of_new_groups(fitted):
    model, X, y, of, _, train = fitted
    low, high = model.predict_interval(X[~train], groups=names(of[~train]), coverage=0.8)
    assert 0.7 < np.mean((low <= y[~train]) & (y[~train] <= high)) < 0.9
    low_new, high_new = model.predict_interval(X[~train], coverage=0.8)
    assert 0.7 < np.mean((low_new <= y[~train]) & (y[~train] <= high_new)) < 0.9
    assert np.mean(high_new - low_new) > 1.5 * np.mean(high - low)
    with pytest.raises(ValueError, match="coverage must be a number between 0 and 1, got 90"):
        model.predict_interval(X, coverage=90)


def test_adapt_knows_a_new_group_from_its_rows_as_if_it_had_been_in_the_fit(fitted):
    model, X, y, of, _, train = fitted
    rows = (of == 7) & train
    again = model.adapt(X[rows], y[rows], groups=["new"] * int(rows.sum()))
    place = model.groups_.tolist().index("g7")
    np.testing.assert_allclose(again.coef_[-1], model.coef_[place], atol=1e-3)
    assert again.groups_[-1] == "new"
    assert "new" not in model.groups_
    np.testing.assert_allclose(
        model.adapt(X[rows], y[rows]).predict(X[rows]), again.predict(X[rows], groups=["new"] * rows.sum())
    )


def test_bx_adapt_finds_the_same_coefficients(fitted, doubles):
    model, X, y, of, _, train = fitted
    rows = (of == 7) & train
    panel = Panel(
        model._scaling.rows(X[rows]),
        (y[rows] - model._scaling.target_shift) / model._scaling.target_scale,
        np.ones(rows.sum()),
        np.array([0, rows.sum()]),
        np.zeros((1, 0)),
    )
    problem = make_problem(panel, model._prior, model._loss)
    new = bx.PerBlock({"row": panel.X, "target": panel.target, "weight": panel.weight}, panel.offsets)
    count = jnp.array([float(rows.sum())])
    blocks = {"known": jnp.zeros((1, 0)), "share": jnp.ones(1), "kept": count}
    x = jax.tree.map(jnp.asarray, model._x)
    w = bx.adapt(problem, x, new, blocks=blocks, y0=jnp.zeros((1, 4, 1)))
    beta = np.asarray(model._prior.mean(x, jnp.zeros(0)) + model._prior.spread(x) @ w[0])
    coef, _ = model._scaling.coefficients(beta)
    np.testing.assert_allclose(coef[:, 0], model.coef_[model.groups_.tolist().index("g7")], atol=1e-3)


def test_a_saved_model_is_the_same_and_damage_is_found(fitted, tmp_path):
    model, X, _, of, _, _ = fitted
    model.save(tmp_path / "model.npz")
    again = GroupedRegressor.load(tmp_path / "model.npz")
    np.testing.assert_array_equal(again.predict(X, groups=names(of)), model.predict(X, groups=names(of)))
    np.testing.assert_array_equal(again.predict_interval(X)[0], model.predict_interval(X)[0])
    np.testing.assert_array_equal(again.prior_.covariance, model.prior_.covariance)
    with pytest.raises(ValueError, match="must hold a GroupedClassifier, got 'GroupedRegressor'"):
        GroupedClassifier.load(tmp_path / "model.npz")
    data = bytearray((tmp_path / "model.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "model.npz").write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        GroupedRegressor.load(tmp_path / "model.npz")


def test_the_plots_show_every_feature_and_group(fitted):
    model, *_ = fitted
    assert len(model.plot_prior().get_xticks()) == 3
    assert sum(bar.get_height() for bar in model.plot_shrinkage().patches) == 150


def test_classes_that_a_group_lacks_have_chances_and_frames_and_tuples_are_read():
    X, y, of, _ = generated(groups=60)
    labels = np.where(y > np.quantile(y, 0.66), "high", np.where(y > np.median(y), "mid", "low"))
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    groups = [("user", int(one)) for one in of]
    model = GroupedClassifier(prior="ridge", max_iter=10, random_state=0).fit(frame, labels, groups=groups)
    chance = model.predict_proba(frame, groups=groups)
    assert chance.shape == (len(y), 3)
    np.testing.assert_allclose(chance.sum(1), 1)
    assert (chance > 0).all()
    assert model.score(frame, labels, groups=groups) > 0.8
    assert model.coef_.shape == (60, 3, 3)
    assert model.groups_[0] == ("user", 0)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"previously unseen labels: \['other'\]"):
        model.adapt(frame[:2], ["low", "other"], groups=groups[:2])
    with pytest.raises(ValueError, match="only one class"):
        GroupedClassifier().fit(X, np.ones(len(X)))


def test_metadata_tells_the_prior_of_a_group():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(200), 4)
    kind, size = random.choice(["a", "b"], 200), random.normal(size=200)
    table = pd.DataFrame({"kind": kind, "size": size}, index=np.arange(200))
    slope = np.where(kind == "a", 2.0, -2.0) + size
    X = random.normal(size=(800, 1))
    y = X[:, 0] * slope[of] + 0.3 * random.normal(size=800)
    model = GroupedRegressor(prior="ridge", max_iter=60, random_state=0).fit(X, y, groups=of, metadata=table)
    new = pd.DataFrame({"kind": ["a", "b"], "size": [1.0, 0.0]}, index=["x", "y"])
    predicted = model.predict([[1.0], [1.0]], groups=["x", "y"], metadata=new)
    np.testing.assert_allclose(predicted, [3.0, -2.0], atol=0.3)
    assert model.score([[1.0], [1.0]], [3.0, -2.0], groups=["x", "y"], metadata=new) > 0.9
    assert model.predict([[1.0]], groups=["x"])[0] == pytest.approx(
        model.prior_.coef[0] + model.prior_.intercept
    )
    with pytest.raises(
        ValueError, match="metadata must have an entry for every group to fit, got none for 7"
    ):
        GroupedRegressor().fit(X, y, groups=of, metadata=table.drop(index=7))


@pytest.mark.parametrize(("loss", "quantile"), [("quantile", 0.9), ("huber", 0.5)])
def test_quantiles_and_outliers(loss, quantile):
    X, y, of, _ = generated()
    noise = np.random.default_rng(5).exponential(size=len(y))
    y = y + (noise if loss == "quantile" else np.where(noise > 3.0, 50.0, 0.0))
    model = GroupedRegressor(loss=loss, quantile=quantile, prior="ridge", max_iter=30, random_state=0)
    predicted = model.fit(X, y, groups=of).predict(X, groups=of)
    if loss == "quantile":
        assert 0.82 < np.mean(y <= predicted) < 0.97
        assert pinball(y - predicted, 0.9).mean() < pinball(y - np.quantile(y, 0.9), 0.9).mean() / 3
        with pytest.raises(ValueError, match="predict_interval needs the squared or Huber's loss"):
            model.predict_interval(X)
    else:
        assert np.median(np.abs(y - predicted)) < 0.6


def test_weights_of_new_groups_are_in_the_units_of_the_fit(tmp_path):
    X, y, of, _ = generated(groups=40)
    short = {"max_iter": 5, "prior": "ridge", "random_state": 0}
    model = GroupedRegressor(**short).fit(X, y, groups=of, sample_weight=np.full(len(y), 20.0))
    model.save(tmp_path / "model.npz")
    again = GroupedRegressor.load(tmp_path / "model.npz")

    def adapted(times, weight):
        rows, target = np.repeat(X[:2], times, axis=0), np.full(2 * times, 50.0)
        weights = None if weight is None else np.full(2 * times, weight)
        return again.adapt(rows, target, sample_weight=weights).predict(X[:2])

    np.testing.assert_allclose(adapted(1, None), adapted(1, 20.0))
    np.testing.assert_allclose(adapted(1, 80.0), adapted(4, 20.0))


def test_sparse_weights_counts_own_losses_and_no_groups():
    X, y, of, _ = generated(groups=40)
    short = {"max_iter": 5, "prior": "ridge", "random_state": 0}
    dense = GroupedRegressor(**short).fit(X, y, groups=of)
    thin = GroupedRegressor(**short).fit(sparse.csr_matrix(X), y, groups=of)
    np.testing.assert_allclose(thin.coef_, dense.coef_)
    weight = np.ones(len(y))
    weight[::3] = 0
    some = GroupedRegressor(**short).fit(X, y, groups=of, sample_weight=weight)
    kept = weight > 0
    np.testing.assert_allclose(
        some.coef_, GroupedRegressor(**short).fit(X[kept], y[kept], groups=of[kept]).coef_
    )
    own = GroupedRegressor(loss=lambda eta, t: 0.5 * (eta - t) ** 2 / 25, **short | {"max_iter": 40})
    assert own.fit(X, y, groups=of).score(X, y, groups=of) > 0.9
    with pytest.raises(TypeError, match="loss must be given by name for a model to be saved"):
        own.save("never written")
    with pytest.warns(UserWarning, match="all rows are one group"):
        alone = GroupedRegressor(**short).fit(X[:, :1], X[:, 0] * 2 + 1)
    np.testing.assert_allclose(alone.predict(X[:5, :1]), X[:5, 0] * 2 + 1, atol=0.05)


def test_learning_from_a_part_first_ends_where_learning_from_all_does(monkeypatch):
    X, y, of, _ = generated(groups=200)
    settings = {"prior": "diagonal", "random_state": 0, "tol": 1e-8}
    whole = GroupedRegressor(**settings).fit(X, y, groups=of)
    monkeypatch.setattr(learning, "enough", lambda prior, groups: 40)
    monkeypatch.setattr(base, "_PREDICTED", 100)  # and predictions are made in pieces
    parts = GroupedRegressor(**settings).fit(X, y, groups=of)
    assert parts.history_[-1] == pytest.approx(whole.history_[-1], rel=1e-3)
    assert parts.history_[0] != pytest.approx(whole.history_[0], rel=1e-6)
    predicted = parts.predict(X, groups=of)
    np.testing.assert_allclose(predicted, (X * parts.coef_[of]).sum(1) + parts.intercept_[of], atol=1e-6)
    single = GroupedRegressor(**settings).fit(X.astype(np.float32), y, groups=of)
    np.testing.assert_allclose(single.prior_.coef, parts.prior_.coef, rtol=1e-2, atol=1e-3)


def test_newcomers_make_the_prior_good_for_groups_that_were_not_in_the_fit():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(60), 60)  # many rows, so that folds hardly see the prior's mean
    X = random.normal(size=(3600, 6))
    slopes = 2 + random.normal(size=(60, 6))
    y = (X * slopes[of]).sum(1) + random.normal(size=3600)
    X_new, of_new = random.normal(size=(2000, 6)), np.repeat(np.arange(400), 5)
    y_new = (X_new * (2 + random.normal(size=(400, 6)))[of_new]).sum(1) + random.normal(size=2000)
    errors = []
    for newcomers in (0.0, 0.2):
        model = GroupedRegressor(newcomers=newcomers, evidence=0.0, prior="diagonal", random_state=0)
        errors.append(np.mean((model.fit(X, y, groups=of).predict(X_new) - y_new) ** 2))
    assert errors[1] < errors[0]


def test_odd_groups_and_features_are_fitted():
    random = np.random.default_rng(0)
    X = np.column_stack([random.normal(size=(60, 30)), np.ones(60)])  # more features than rows, one constant
    of = np.repeat(np.arange(20), 3).tolist()
    of[0] = "alone"
    y = X[:, 0] + 0.1 * random.normal(size=60)
    model = GroupedRegressor(max_iter=20, random_state=0).fit(X, y, groups=of)
    assert model.prior_.form == "diagonal"
    assert np.isfinite(model.predict(X, groups=of)).all()
    assert abs(model.prior_.coef[-1]) < 1e-6
    same = GroupedRegressor(max_iter=3, random_state=0).fit(X[:, :2], np.ones(60), groups=of)
    np.testing.assert_allclose(same.predict(X[:, :2], groups=of), 1.0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": [1, 2]}, "groups must have one entry for each of the 6 rows of X, got 2"),
        ({"groups": [1, 1, 2, 2, None, 3]}, "groups must not be missing, got None in row 4"),
        ({"groups": np.array([1.0, 1, 2, np.nan, 2, 3])}, "groups must not be missing, got nan in row 3"),
        ({"groups": [[1], [1], [2], [2], [3], [3]]}, "groups must be hashable"),
        ({"groups": np.ones((6, 2))}, r"groups must be one-dimensional, got shape \(6, 2\)"),
        ({"groups": "aabbcc"}, "groups must hold one group per row, got str"),
        ({"X": np.full((6, 2), np.nan)}, "NaN"),
        ({"y": [1.0] * 5}, "inconsistent"),
        ({"loss": "absolute"}, r"loss must be one of .* or a function, got 'absolute'"),
        ({"prior": "lasso"}, r"prior must be .* got 'lasso'"),
        ({"prior": lambda z: z}, "prior is a function of metadata, so metadata must be given"),
        ({"metadata": 3}, "metadata must be a pandas frame indexed by group, or a dict"),
        ({"folds": 1}, "folds must be a whole number from 2, got 1"),
        ({"judge": "users"}, "judge must be 'groups' or 'rows', got 'users'"),
        ({"newcomers": 1.0}, "newcomers must be a number from 0 to 1, got 1.0"),
        ({"unseen": "zero"}, "unseen must be 'prior' or 'error', got 'zero'"),
        ({"quantile": 1.5}, "quantile must be a number between 0 and 1"),
        ({"tol": -1.0}, "tol must be a number from 0 to 1, got -1.0"),
        ({"loss": "poisson", "y": [1.0, -1, 0, 0, 1, 1]}, "y must not be negative"),
        ({"sample_weight": np.zeros(6)}, "Sample weights must contain at least one non-zero"),
    ],
)
def test_bad_input_is_refused(change, message):
    data = {"X": np.arange(12.0).reshape(6, 2), "y": np.arange(6.0), "groups": [1, 1, 2, 2, 3, 3]}
    data |= {name: one for name, one in change.items() if name in (*data, "metadata", "sample_weight")}
    parameters = {name: one for name, one in change.items() if name not in data}
    with pytest.raises((ValueError, TypeError), match=message):
        GroupedRegressor(**parameters).fit(**data)


def test_groups_pass_through_pipelines_and_searches():
    X, y, of, _ = generated(groups=30)
    with sklearn.config_context(enable_metadata_routing=True):
        model = GroupedRegressor(prior="ridge", max_iter=3, random_state=0)
        model = (
            model.set_fit_request(groups=True).set_score_request(groups=True).set_predict_request(groups=True)
        )
        pipe = make_pipeline(StandardScaler(), model)
        search = GridSearchCV(
            pipe, {"groupedregressor__folds": [2, 3]}, cv=GroupKFold(2), error_score="raise"
        )
        search.fit(X, y, groups=of)
        assert search.best_estimator_.predict(X, groups=of).shape == y.shape


def test_an_interrupted_fit_keeps_its_model_and_raises(capsys):
    X, y, of, _ = generated(groups=30)

    class Impatient:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, step, speed, metrics):
            if step == 2:
                raise KeyboardInterrupt

    model = GroupedRegressor(prior="ridge", progress=Impatient(), random_state=0)
    with pytest.raises(KeyboardInterrupt, match="the prior is that of 2 steps"):
        model.fit(X, y, groups=of)
    assert model.outcome_ is bx.Outcome.INTERRUPTED
    assert model.score(X, y, groups=of) > 0.5
    model.set_params(raise_on_interrupt=False).fit(X, y, groups=of)
    assert "was interrupted" in capsys.readouterr().err


CHECKS = (
    "check_estimators_nan_inf",
    "check_estimators_pickle",
    "check_estimators_unfitted",
    "check_no_attributes_set_in_init",
    "check_n_features_in",
)


@pytest.mark.filterwarnings("ignore:groups were not given")
@pytest.mark.parametrize("kind", [GroupedRegressor, GroupedClassifier])
def test_scikit_learns_checks_pass(kind):
    # Those of the classifier pass too, but for the equivalence of a weight of two and a repeated row, which
    # falls into another fold. They take long, so that some are enough here.
    for estimator, check in estimator_checks_generator(kind(prior="ridge", max_iter=1, random_state=0)):
        if kind is GroupedClassifier and check.func.__name__ not in CHECKS:
            continue
        with contextlib.suppress(SkipTest):
            check(estimator)


@pytest.mark.parametrize("size", [1, 7, 65])
def test_small_systems_are_solved(size, doubles):
    random = np.random.default_rng(0)
    half = random.normal(size=(5, size, size))
    matrices = half @ np.swapaxes(half, 1, 2) + np.eye(size)
    right = random.normal(size=(5, size, 2))
    found = solve(jnp.asarray(matrices), jnp.asarray(right))
    np.testing.assert_allclose(found, np.linalg.solve(matrices, right), atol=1e-9)


def test_a_prior_may_be_a_function_of_metadata_learnt_from_some_of_the_groups():
    random = np.random.default_rng(0)
    of = np.repeat(np.arange(150), 4)
    age = random.normal(size=150)
    X = random.normal(size=(600, 1))
    y = X[:, 0] * (age**2)[of] + 0.1 * random.normal(size=600)
    table = dict(enumerate(age))
    model = GroupedRegressor(prior=lambda z: [z[0], z[0] ** 2], prior_groups=100, max_iter=60, random_state=0)
    model.fit(X, y, groups=of, metadata=table)
    assert model.coef_.shape == (150, 1)
    predicted = model.predict([[1.0], [1.0]], groups=["a", "b"], metadata={"a": -2.0, "b": 0.0})
    np.testing.assert_allclose(predicted, [4.0, 0.0], atol=0.4)
