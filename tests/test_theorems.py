"""The experiments on the theorems: exact truth, recovered exponents, and the files they write."""

from __future__ import annotations

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

import bilevax as bx
import bilevax.testing
from bilevax.cli import app
from bilevax.experiments.report import Report
from bilevax.experiments.theorems import error_terms, lanes, lemmas, rates, restarts
from bilevax.experiments.theorems.curved_truth import truth_of
from bilevax.experiments.theorems.error_terms import ErrorTerms
from bilevax.experiments.theorems.fits import fit_exponent
from bilevax.experiments.theorems.problems import (
    copied,
    make_family,
    make_task,
    noise_of_terms,
    stationary_point,
    step_constants,
    with_common_factor,
)
from bilevax.experiments.theorems.scalings import METHODS, Sizes
from bilevax.experiments.theorems.truth import Gap, Truth

SIZES = Sizes(6, 2, 3)


@pytest.fixture(scope="module")
def family():
    return make_family("quadratic", 6, 3, 10)


def read(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_planted_exponent_is_recovered_within_its_interval():
    rng = np.random.default_rng(0)
    epsilon = np.array([0.4, 0.2, 0.1, 0.05])
    noise = np.exp(0.05 * rng.normal(size=(100, 4, 5)))
    found = [fit_exponent(epsilon, 7 * epsilon[:, None] ** -3.3 * one) for one in noise]
    assert max(abs(one.slope + 3.3) for one in found) < 0.1
    assert 88 <= sum(abs(one.slope + 3.3) < one.half_width for one in found) <= 99  # of 100, at 95%
    assert found[0].at(np.array([0.1]))[0] == pytest.approx(7 * 0.1**-3.3, rel=0.1)


def test_a_fit_leaves_out_an_abscissa_where_a_seed_failed():
    steps = np.array([[8.0, 8.0], [64.0, 64.0], [np.inf, 512.0]])
    found = fit_exponent(np.array([4.0, 2.0, 1.0]), steps)
    assert (found.points, round(found.slope, 6)) == (2, -3.0)
    assert np.isnan(fit_exponent(np.array([4.0]), steps[:1]).slope)
    with pytest.raises(ValueError, match="row per abscissa"):
        fit_exponent(np.array([1.0]), steps)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (7, 2.365), (30, 2.042)])
def test_confidence_intervals_use_students_quantiles(freedom, quantile):
    steps = np.exp(np.random.default_rng(1).normal(size=(3, freedom + 1)))
    found = fit_exponent(np.array([4.0, 2.0, 1.0]), steps)
    assert found.half_width / found.error == pytest.approx(quantile, abs=2e-3)


@pytest.mark.parametrize("kind", ["quadratic", "mean", "curved"])
def test_the_traced_truth_equals_the_familys(kind):
    family = make_family(kind, 6, 3, 10)
    truth, x = truth_of(family), np.array([0.3, -1.2, 0.7], np.float32)
    y = family.lower_solution(x)
    np.testing.assert_allclose(truth.gradient(x), family.gradient(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(truth.lower_solution(x), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(truth.lower_gradient(x, y.astype(np.float32)), 0, atol=1e-5)
    if kind == "mean":
        return
    v, there = family.inverse_solution(x), y.astype(np.float32)
    np.testing.assert_allclose(truth.inverse_solution(x, there), v, rtol=1e-4, atol=1e-5)
    found = truth.mean_term(x, there, v.astype(np.float32))
    np.testing.assert_allclose(found, family.gradient(x), rtol=1e-4, atol=1e-5)
    off, (hessian, _) = there + 0.5, family.lower_curvature(x, y + 0.5)
    np.testing.assert_allclose(truth.hessian(x, off), hessian, rtol=1e-4, atol=1e-5)
    by_v = np.einsum("mij,mj->mi", hessian, v) - family.upper_slopes(x, y + 0.5)[1]
    np.testing.assert_allclose(
        truth.inverse_gradient(x, off, v.astype(np.float32)), by_v, rtol=1e-4, atol=1e-4
    )


def test_the_gap_is_that_of_the_pl_family():
    family = bilevax.testing.pl_blocks(m=4, d_x=2, d_y=3, rows=5)
    gap, x = Gap.of(family), family.optimum + np.array([0.4, -0.1])
    assert float(gap(x.astype(np.float32))) == pytest.approx(family.value(x), rel=1e-4)
    assert float(gap(family.optimum.astype(np.float32))) == 0


@pytest.mark.parametrize("kind", ["quadratic", "curved"])
def test_copies_and_a_common_factor_leave_f_unchanged(kind):
    family = make_family(kind, 6, 3, 10)
    x = np.array([0.3, -1.2, 0.7])
    tripled, common = copied(family, 3), with_common_factor(family)
    for other in (tripled, common):
        np.testing.assert_allclose(other.gradient(x), family.gradient(x), rtol=1e-12)
    found = bx.hypergradient(tripled.problem, jnp.asarray(x, jnp.float32), tripled.y0)
    np.testing.assert_allclose(found, family.gradient(x), rtol=1e-3, atol=1e-4)
    factors = common.problem.lower_data[0].packed.unpacked()
    np.testing.assert_array_equal(factors["jacobian_factor"], factors["hessian_factor"])
    np.testing.assert_allclose(factors["jacobian_factor"].reshape(6, 10).mean(1), 1, rtol=1e-6)
    assert tripled.problem.count == 18


@pytest.mark.parametrize("kind", ["quadratic", "curved"])
def test_the_noise_of_terms_is_the_variance_of_samples(kind):
    quiet = bilevax.testing.quadratic_blocks(m=4, d_x=2, d_y=2, rows=3, noise=0.0)
    assert noise_of_terms(quiet)["rows"] == pytest.approx(0, abs=1e-20)
    family = make_family(kind, 6, 3, 10)
    x = stationary_point(family)
    y, v = family.lower_solution(x), family.inverse_solution(x)
    (level,), rows = family.problem.levels.values(), family.problem.lower_data[0].packed.unpacked()
    rows = {name: np.asarray(array).reshape(6, 10, *array.shape[1:]) for name, array in rows.items()}

    def term(block, row, y, v):
        row = jax.tree.map(lambda a: a[None], row)
        return -jax.grad(lambda x: jnp.vdot(jax.grad(level.function, 1)(x, y, block, row), v))(x)

    by_row = jax.vmap(jax.vmap(term, (None, 0, None, None)), (0, 0, 0, 0))
    blocks = {name: jnp.asarray(array) for name, array in family.problem.blocks.items()}
    x = x.astype(np.float32)
    samples = family.upper_slopes(x, y)[0][:, None] + np.asarray(
        by_row(blocks, rows, y.astype(np.float32), v.astype(np.float32)), float
    )
    noise = noise_of_terms(family)
    assert noise["blocks"] == pytest.approx(samples.mean(1).var(0).sum(), rel=1e-4)
    assert noise["rows"] == pytest.approx(samples.var(1).sum(1).mean(), rel=1e-4)


@pytest.mark.parametrize("name", list(METHODS))
def test_parameters_scale_as_the_theorem_says(name, family):
    method = METHODS[name]
    large, small = (method.make(0.3, epsilon, SIZES, family.constants) for epsilon in (0.02, 0.01))
    power = 2 if method.exponent == -3 else 4  # η ∝ ε or ε²: its square over β's
    assert large.beta / small.beta == pytest.approx(4)
    assert (large.upper_step / small.upper_step) ** 2 == pytest.approx(2**power)


def test_lanes_agree_with_a_plain_loop(family):
    solver = METHODS["MMBO-v2"].make(1.0, 0.5, SIZES, family.constants)
    task, goal = make_task(family, SIZES, "all"), 1.0
    keys = jax.random.split(jax.random.key(3), 2)
    truth = Truth.of(family)
    reached = lanes.steps_until(task, [solver], keys, truth.squared_gradient, goal, 500, progress=None)
    for key, steps in zip(keys, reached.steps[0], strict=True):
        state = solver.init(task.problem, task.x0, task.y0, key=key, sampling=task.sampling)
        step, total = jax.jit(solver.step), 0.0
        for t in range(1, 501):
            total += float(np.sum(family.gradient(state.x) ** 2))
            if total / t <= goal:
                break
            state, _ = step(task.problem, state)
        assert t == steps


def test_lanes_that_diverge_or_are_too_slow_do_not_reach_the_goal(family):
    slow = METHODS["MMBO-v2"].make(0.01, 0.3, SIZES, family.constants)
    wild = dataclasses.replace(slow, upper_step=1e6)
    task = make_task(family, SIZES, None)
    reached = lanes.steps_until(
        task,
        [slow, wild],
        jax.random.split(jax.random.key(0), 2),
        Truth.of(family).squared_gradient,
        1e-9,
        60,
        None,
    )
    assert np.isinf(reached.steps).all()


@pytest.mark.parametrize(("name", "exact"), [("BSVRB v1", "zsH"), ("BSVRB v2", "zsu")])
@pytest.mark.parametrize("kind", ["quadratic", "curved"])
def test_without_noise_and_with_all_blocks_estimators_have_no_error(name, exact, kind):
    family = bilevax.testing.FAMILIES[kind](m=4, d_x=2, d_y=2, rows=3, noise=0.0)
    solver = METHODS[name].make(0.5, 0.1, Sizes(4, 4, 2), step_constants(family))
    task = lanes.Task(family.problem, family.x0, family.y0, bx.Sampling(4, 2, False, "all"))
    keys = jax.random.split(jax.random.key(0), 1)
    seen = lanes.trace(task, [solver], keys, ErrorTerms(truth_of(family)), [7], None)
    assert max(seen[term].max() for term in exact) < 1e-10
    assert seen["y"].max() > 1e-4  # y starts from zero, and x moves


def test_the_unit_of_upper_steps_is_the_largest_curvature_on_the_way_from_x0():
    family = make_family("curved", 6, 3, 10)
    found, x = step_constants(family).upper_smoothness, np.asarray(family.x0, float)
    assert found < family.constants.upper_smoothness
    end = stationary_point(family)
    slopes = [np.linalg.norm(family.gradient(x + t * (end - x)) - family.gradient(end)) for t in (0, 0.5)]
    distances = [np.linalg.norm(end - x), 0.5 * np.linalg.norm(end - x)]
    assert max(a / b for a, b in zip(slopes, distances, strict=True)) < 1.1 * found


@pytest.mark.parametrize("kind", ["quadratic", "curved"])
@pytest.mark.parametrize(("name", "terms"), [("BSVRB v1", "ysH"), ("BSVRB v2", "ysuv")])
def test_the_lemmas_hold_in_a_simulation(kind, name, terms):
    options = dataclasses.replace(TINY, family=kind, lemma_epsilon=0.3, lemma_steps=60, lemma_seeds=16)
    rows = lemmas.checked(name, 0.7, options)
    assert [row["lemma"] for row in rows] == [f"δ_{term}" for term in terms]
    for row in rows:
        assert row["least"] > 0.99, row
        assert row["summed"] > 1, row
        assert row["δ"] > 0


def test_a_recursion_is_violated_if_errors_grow_faster_than_the_lemma_allows():
    ones, solver = (
        np.ones(4),
        METHODS["BSVRB v1"].make(0.5, 0.1, SIZES, make_family("curved", 6, 3, 10).constants),
    )
    calm = {"y": ones, "s": ones, "H": ones, "Δx": 0 * ones, "Δy": 0 * ones, "σ_s": 0 * ones, "σ_H": 0 * ones}
    known = make_family("curved", 6, 3, 10).constants
    found = lemmas.recursions(calm, calm, solver, SIZES, known)
    assert found["H"].least == pytest.approx(1 - solver.alpha_bar / 3)  # nothing moves: the error must fall
    assert found["s"].least == pytest.approx(1 - solver.alpha / 3)
    grown = lemmas.recursions(calm, calm | {"y": 5 * ones}, solver, SIZES, known)
    assert grown["y"].least < found["y"].least < 1 + 8 * solver.lower_step


def test_constant_parameters_are_those_of_their_stage(family):
    solver = restarts.at_stage(METHODS["BSVRB v2"].make(0.5, 0.1, SIZES, family.constants), 2)
    base = METHODS["BSVRB v2"].make(0.5, 0.1, SIZES, family.constants)
    assert solver.beta == base.beta / 4
    assert solver.upper_step == pytest.approx(base.upper_step / 2)
    assert solver.inverse_step == pytest.approx(base.inverse_step / 2)


TINY = rates.RatesOptions(
    methods=("MMBO-v2",),
    parts=("epsilon", "control", "sizes"),
    averaged_epsilons=(0.6, 0.5),
    epsilons=(0.6,),
    constants=(0.7,),
    seeds=2,
    max_steps=5000,
    blocks=8,
    blocks_per_step=4,
    batch_size=8,
    dimension=2,
    rows=10,
    control_epsilons=1,
    control_max_steps=2000,
    size_methods=("MMBO-v2",),
    size_epsilon=0.6,
    block_copies=(1, 2),
    blocks_per_steps=(4,),
    batch_sizes=(8,),
    full_batch_sizes=(),
    error_epsilon=0.5,
    error_steps=20,
)


def test_rates_write_tables_plots_and_settings(tmp_path, monkeypatch):
    curves = rates.run(TINY, tmp_path)
    assert [row["method"] for row in read(tmp_path / "rates.csv")] == ["MMBO-v2"]
    assert np.isfinite(curves["MMBO-v2"].steps).all()
    assert [row["varied"] for row in read(tmp_path / "sizes.csv")] == ["m", "I", "B"]
    for name in ("tuning.md", "rates.png", "control.csv", "sizes.png", "settings.json"):
        assert (tmp_path / name).stat().st_size > 0
    # All of it is kept: to write the tables again takes no run.
    monkeypatch.setattr(rates, "steps_to_epsilon", None)
    monkeypatch.setattr(lanes, "steps_until", None)
    again = rates.run(TINY, tmp_path, resume=True)
    np.testing.assert_array_equal(again["MMBO-v2"].steps, curves["MMBO-v2"].steps)


def test_the_values_of_epsilon_on_the_command_line_are_those_of_all_methods(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(rates, "run", lambda options, folder, **others: asked.append(options))
    words = ["rates", "--epsilon", "0.3", "--epsilon", "0.2", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, ["reproduce", *words]).exit_code == 0
    assert asked[0].epsilons == asked[0].averaged_epsilons == (0.3, 0.2)


def test_methods_for_mean_blocks_are_left_out_of_the_curved_family():
    curved = rates.RatesOptions(family="curved")
    assert set(rates.RatesOptions().run_methods) - set(curved.run_methods) == {"MSVR-v2", "SONG"}


def test_error_terms_write_a_table_and_a_plot(tmp_path):
    constants = {"BSVRB v2": 0.7}
    results = {name: task() for name, task in error_terms.tasks(constants, TINY).items()}
    found = error_terms.write(results, constants, TINY, Report(tmp_path, TINY))
    (row,) = read(tmp_path / "errors.csv")
    late = found["BSVRB v2"]["step"] >= 10
    assert float(row["δ_z/ε²"]) == pytest.approx(found["BSVRB v2"]["z"][:, late].mean() / 0.25)
    assert (tmp_path / "errors.png").stat().st_size > 1000


def test_it_is_an_error_if_no_constant_reaches_epsilon():
    with pytest.raises(ValueError, match="constants must contain one"):
        rates.best_constant("SONG", {0.5: np.inf, 1.0: np.inf}, TINY)


def test_a_race_ends_when_the_winner_is_certain():
    unsettled = np.array([[100, 0], [0, 0]])
    settled = np.array([[100, 140], [0, 90]])
    assert not lanes._settled(unsettled, 10**6, race=True)
    assert not lanes._settled(settled, 200, race=True)
    assert lanes._settled(settled, 240, race=True)
    assert not lanes._settled(settled, 10**6, race=False)
    assert lanes._settled(np.array([[100, -1]]), 100, race=False)


def test_restarts_write_a_table_and_a_plot(tmp_path):
    options = restarts.RestartsOptions(
        methods=("BSVRB v2",), first=50, stages=3, tuning_stages=3, constants=(0.2,), constant_stages=(0,),
        seeds=2, blocks=6, blocks_per_step=3, batch_size=4, dimension=2, rows=10,
    )  # fmt: skip
    curves = restarts.run(options, tmp_path)
    rows = [row["parameters"] for row in read(tmp_path / "restarts.csv")]
    assert rows == ["restarts", restarts.RESET, restarts.PRINTED, "k = 0"]
    assert np.isfinite([curve.gap.min() for curve in curves]).all()
    assert curves[0].gap[:, -1].max() < curves[0].gap[:, 0].min()
    assert (tmp_path / "restarts.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rates", "--method", "SGD"], "methods must be among"),
        (["rates", "--part", "m"], "parts must be among"),
        (["rates", "--family", "flat"], "family must be among"),
        (["rates", "--epsilon", "0.1", "--epsilon", "0.2"], "epsilons must be positive, the largest first"),
        (["choices", "--family", "flat"], "family must be among"),
        (["restarts", "--method", "SONG"], "methods must be among"),
    ],
)
def test_unknown_names_are_an_error_message(arguments, words, tmp_path):
    result = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert words in result.output
