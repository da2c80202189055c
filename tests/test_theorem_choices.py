"""The variants do what their names say, and the experiment on them writes its tables."""

from __future__ import annotations

import csv

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
from bilevax.experiments.theorems import choices, questions
from bilevax.experiments.theorems.answers import QUESTIONS, Answer, ChoicesOptions, Grid
from bilevax.experiments.theorems.problems import make_family, stationary_point
from bilevax.experiments.theorems.scalings import Sizes, variance_reduced
from bilevax.experiments.theorems.variants import EagerSolve, ExtraBatchBSVRBv1, SameBatchBSVRBv1
from bilevax.solvers.toolkit import Clock, Clocks, CompensatedSum, Memory, Moving, Rates, Visit

KINDS = (bx.BSVRBv1, SameBatchBSVRBv1, ExtraBatchBSVRBv1)
VERSION_1 = {"upper_step": 0.1, "lower_step": 0.1, "alpha": 0.3, "beta": 0.3, "floor": 0.5}


def run(kind, noise, steps):
    family = bilevax.testing.quadratic_blocks(m=4, d_x=2, d_y=2, rows=9, noise=noise)
    return bx.minimize(
        family.problem,
        family.x0,
        family.y0,
        solver=kind(**VERSION_1),
        steps=steps,
        key=jax.random.key(1),
        blocks_per_step=2,
        batch_size=2,
        progress=None,
    ).state


def test_an_eager_projection_projects_in_every_missed_step():
    rng = np.random.default_rng(0)
    value, slope = rng.normal(size=(2, 3, 4)).astype(np.float32)
    value *= 1.4 / np.linalg.norm(value, axis=1, keepdims=True)
    step, radius, missed = 0.2, 1.5, [0, 1, 6]
    clock = Clock.start(jnp.float32)
    for _ in range(8):
        clock = clock.advance(jnp.asarray(step))
    behind = jnp.asarray([step * (8 - one) for one in missed], jnp.float32)
    moving = Moving(jnp.asarray(value), jnp.asarray(slope), CompensatedSum(behind, jnp.zeros(3)))
    rates = Rates(*[None] * 5, step, radius, *[None] * 3)
    visit = Visit(Memory(y=moving, v=moving), Clocks(clock, clock), rates, jnp.asarray(8), "y", True, True, 1)
    now, before = EagerSolve().directions(visit, [])
    for block, count in enumerate(missed):
        path = [value[block]]
        for _ in range(count):
            v = path[-1] - step * slope[block]
            path.append(v * min(1, radius / np.linalg.norm(v)))
        np.testing.assert_allclose(now[block], path[-1], rtol=1e-4)
        np.testing.assert_allclose(before[block], path[max(0, count - 1)], rtol=1e-4)


def test_without_noise_it_does_not_matter_which_hessian_is_used():
    ends = [run(kind, noise=0.0, steps=6).x for kind in KINDS]
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4)
    np.testing.assert_allclose(ends[2], ends[0], rtol=1e-4)
    assert np.linalg.norm(ends[0] - 1) > 0.01  # x0 is one


def test_the_refreshed_hessian_is_used_at_once_and_stored():
    old, same, extra = (run(kind, noise=1.0, steps=1) for kind in KINDS)
    hessians = [next(iter(state.levels.values())).hessian for state in (old, same, extra)]
    np.testing.assert_allclose(hessians[1], hessians[0], rtol=1e-6)  # refreshed on the same rows
    assert np.abs(hessians[2] - hessians[0]).max() > 1e-3  # on others
    assert np.abs(same.z - old.z).max() > 1e-4  # but used a step earlier


def test_the_stationary_point_is_stationary():
    family = make_family("quadratic", 6, 3, 10)
    assert np.linalg.norm(family.gradient(stationary_point(family))) < 1e-8


def test_choices_write_their_tables(tmp_path):
    grid = Grid((0.5,), (0.35,), (0.3,))
    options = ChoicesOptions(
        questions=("gamma", "slope", "output"), epsilon=0.6, grids=dict.fromkeys(QUESTIONS, grid),
        copies=(1,), seeds=2, max_steps=500, blocks=6, blocks_per_step=3, batch_size=8, dimension=2, rows=10,
    )  # fmt: skip
    answers = choices.run(options, tmp_path)
    gammas, slopes = ["by the formula", "1 − α (STORM)", "0"], ["s_{t+1}", "s_t, as printed"]
    assert [answer.variant for answer in answers] == gammas + 2 * slopes
    assert all((one.steps != other.steps).any() for one, other in (answers[3:5], answers[5:]))
    assert np.isfinite(answers[0].steps).all()
    with (tmp_path / "outputs.csv").open(encoding="utf-8") as file:
        (first, *_) = csv.DictReader(file)
    assert float(first["random"].split()[0]) <= 1.0


@pytest.mark.parametrize("ratio", [4, 32])
def test_gamma_is_that_of_the_theorem_however_few_blocks_are_sampled(ratio):
    given = variance_reduced(0.5, 0.1, Sizes(5 * ratio, 5, 4), make_family("quadratic", 6, 3, 10).constants)
    alpha = given["alpha"]
    assert given["gamma"] == pytest.approx((ratio - 1) / (1 - alpha) + 1 - alpha)


def test_falling_parameters_meet_those_of_the_theorem_where_their_epsilon_does():
    family, sizes = make_family("quadratic", 6, 3, 10), Sizes(6, 3, 4)
    given = variance_reduced(0.5, 0.1, sizes, family.constants)
    solver = questions.falling(given, 0.1, sizes, family.constants)
    assert solver.gamma is None  # it follows α
    for name, value in given.items():
        if name.startswith("gamma"):
            continue
        schedule = getattr(solver, name)
        np.testing.assert_allclose(schedule(jnp.asarray(7999)), value, rtol=1e-6)  # 2 · 8000^(−1/3) = 0.1
        power = 1 / 3 if name.endswith("step") else 2 / 3
        np.testing.assert_allclose(schedule(jnp.asarray(63_999)), value / 8**power, rtol=1e-6)
        assert value < schedule(jnp.asarray(0)) <= 0.5


def test_a_legend_stands_below_the_longest_case():
    cases = ("independent noise", "correlated, ᾱ = 0.2", "independent noise, m/I = 16")
    shown = [Answer("hessian", name, case, np.array([5.0, 6.0]), None) for case in cases for name in "abc"]
    figure = choices._plot(shown)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    labels = [label.get_window_extent() for label in axis.get_xticklabels()]
    assert axis.get_legend().get_window_extent().y1 <= min(one.y0 for one in labels)


def test_an_unknown_question_is_an_error_message(tmp_path):
    result = CliRunner().invoke(app, ["reproduce", "choices", "--question", "why", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "questions must be among" in result.output
