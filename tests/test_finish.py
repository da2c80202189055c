"""Exact steps at the end of a run."""

import types
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._run.descent import Exact
from bilevax._run.finish import Effort, Finished, Kept, affordable_effort, finish
from bilevax.testing import logistic_blocks, quadratic_blocks, ridge_blocks


def run(case, steps=600, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bx.AccuracyWarning)
        return bx.minimize(case.problem, case.x0, case.y0, steps=steps, progress=None, **options)


def gap(case, x, start=None):
    return (case.value(x) - case.least) / (case.value(case.x0 if start is None else start) - case.least)


@pytest.mark.parametrize("make", [quadratic_blocks, ridge_blocks])
def test_exact_steps_end_at_the_minimum_that_a_short_run_is_far_from(make):
    case = make(m=20, d_x=4, d_y=4, rows=20, conditioning=30.0)
    few = {"blocks_per_step": 2, "batch_size": 2}
    without = run(case, stop=bx.Stop(finish=False, verify=True), **few)
    result = run(case, stop=bx.Stop(verify=True), **few)
    assert without.finish is None
    assert gap(case, without.x) > 1e-3
    assert gap(case, result.x) < 1e-5
    np.testing.assert_array_equal(result.state.x, without.x)
    assert result.finish.after < result.finish.before
    assert str(result.finish) in result.message


def test_y_is_solved_at_the_x_that_is_returned():
    case = logistic_blocks(m=12, d_x=3, d_y=3, rows=20)
    result = run(case)
    assert result.finish is not None
    np.testing.assert_allclose(result.y, case.lower_solution(result.x), rtol=1e-3, atol=1e-4)
    assert result.finish.after == pytest.approx(case.value(result.x), rel=1e-5)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_units_of_x_and_of_f_do_not_matter(unit):
    case = quadratic_blocks(m=10, d_x=4, d_y=4, rows=10, conditioning=30.0)

    def scaled(of_x, of_f):
        given = case.problem
        return bx.Problem(
            upper=lambda x, y, block, batch: of_f * given.upper(x / of_x, y, block, batch),
            lower=lambda x, y, block, batch: given.levels["lower"].function(x / of_x, y, block, batch),
            blocks=given.blocks,
            upper_data=given.upper_data,
            lower_data=given.lower_data[0],
        )

    for of_x, of_f in ((unit, 1.0), (1.0, unit)):
        result = bx.minimize(scaled(of_x, of_f), of_x * case.x0, case.y0, steps=500, progress=None)
        assert result.finish is not None
        assert gap(case, np.asarray(result.x, np.float64) / of_x) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"solver": bx.SOBA(upper_step=0.01)},
        {"solver": bx.SOBA(upper_step=bx.automatic_step(speed=0.5))},
        {"solver": bx.SOBA(upper_step=bx.bounded(bx.automatic_step(), -0.1, 0.1))},
        {"stop": bx.Stop(patience=50)},
        {"stop": bx.Stop(verify=False)},
        {"stop": bx.Stop(finish=False)},
        {"steps": 100},
        {"steps": 0, "stop": bx.Stop(verify=True)},
    ],
)
def test_x_stays_where_steps_that_were_chosen_have_brought_it(options):
    case = quadratic_blocks(m=6, d_x=3, d_y=3, rows=10)
    result = run(case, **options)
    assert result.finish is None
    np.testing.assert_array_equal(result.x, result.state.x)


def test_lower_problems_without_a_unique_minimum_are_left_alone():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2) + jnp.sum(x**2),
        lower=lambda x, y, block, batch: (y[0] + y[1] - x[0]) ** 2,
        blocks=jnp.arange(8.0).reshape(4, 2),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = bx.minimize(problem, jnp.ones(1), jnp.zeros((4, 2)), steps=600, progress=None)
    assert result.finish is None
    assert any(one.category is bx.AccuracyWarning for one in caught)


def test_x_that_has_hardly_moved_is_no_obstacle():
    case = quadratic_blocks(m=6, d_x=3, d_y=3, rows=10)
    state = run(case, steps=20).state
    found = finish(case.problem, state, case.x0, Effort(6, 1000))
    assert isinstance(found, Finished)
    assert gap(case, found.x) < 1e-5


def test_the_search_ends_when_it_is_told_to_with_the_best_so_far():
    case = quadratic_blocks(m=6, d_x=3, d_y=3, rows=10, conditioning=30.0)
    state, looks = run(case, steps=20).state, iter(range(5))
    found = finish(case.problem, state, case.x0, Effort(6, 1000), lambda: next(looks, None) is None)
    assert isinstance(found, Finished)
    assert found.report.evaluations < 15
    assert found.report.after <= found.report.before
    assert found.report.falling > 0
    assert isinstance(finish(case.problem, state, case.x0, Effort(6, 1000), lambda: True), Kept)


def test_a_run_that_still_falls_when_its_evaluations_are_used_up_says_so():
    case = logistic_blocks(m=6, d_x=6, d_y=6, rows=30, conditioning=100.0)
    state = run(case, steps=20).state
    found = finish(case.problem, state, case.x0, Effort(6, 20))
    assert isinstance(found, Finished)
    assert found.report.falling > 0
    assert "steps=2000 instead of 500" in found.report.doubt(500)


def test_a_run_that_was_killed_and_resumed_ends_at_the_same_bits(tmp_path):
    case = ridge_blocks(m=8, d_x=3, d_y=3, rows=10)
    whole = run(case)
    saves = bx.Checkpoint(tmp_path, resume=True)
    run(case, steps=300, checkpoint=saves)
    resumed = run(case, checkpoint=saves)
    for one, other in zip(
        jax.tree.leaves((whole.x, whole.y)), jax.tree.leaves((resumed.x, resumed.y)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert resumed.finish == whole.finish


def test_an_f_without_a_minimum_is_named():
    problem = bx.Problem(
        upper=lambda x, y, block, batch: -jnp.sum(y * block),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=1 + jnp.arange(8.0).reshape(4, 2),
    )
    state = bx.minimize(problem, jnp.ones(2), jnp.ones((4, 2)), steps=20, progress=None).state
    found = finish(problem, state, jnp.ones(2), Effort(4, 1000))
    assert isinstance(found, Finished)
    assert found.report.is_endless
    assert "no minimum" in found.report.doubt(500)


@pytest.mark.parametrize(
    ("count", "width", "work", "risk", "wanted"),
    [
        (1000, 64, 1e15, None, "all"),
        (200_000, 64, 1e15, None, "all"),  # in parts: the Hessians of all do not fit into memory
        (200_000, 64, 1e15, bx.cvar(0.5), "none"),  # a risk of all is not the mean of those of parts
        (1000, 8, 0.0, None, "all"),
        (50_000, 16, 0.0, None, "a sample"),
        (400_000, 16, 0.0, bx.cvar(0.5), "none"),  # a sample has another risk
        (50_000_000, 16, 0.0, None, "none"),
    ],
)
def test_a_sample_is_solved_where_all_blocks_would_be_too_much(count, width, work, risk, wanted):
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(y),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
        blocks=count,
        risk=risk,
    )
    y = np.broadcast_to(np.float32(0), (count, width))
    effort = affordable_effort(problem, types.SimpleNamespace(x=jnp.zeros(1), y=y), work)
    if wanted == "none":
        assert effort is None
        return
    assert effort.newton_steps >= 25
    assert effort.blocks == count if wanted == "all" else 64 <= effort.blocks <= count // 3


@pytest.mark.parametrize("most", [7, 10])
def test_blocks_that_are_solved_in_parts_give_the_same(monkeypatch, most):
    case = ridge_blocks(m=20, d_x=3, d_y=3, rows=20)
    state = run(case, steps=20).state
    blocks = np.arange(1, 20)
    whole = Exact(case.problem, state, blocks, 1000)
    monkeypatch.setattr("bilevax._run.descent.at_once", lambda problem, y: most)
    parts = Exact(case.problem, state, blocks, 1000)
    at = whole.flat(case.x0)
    one, other = whole(at, whole.tracked), parts(at, parts.tracked)
    assert one is not None
    assert other is not None
    assert other.value == pytest.approx(one.value, rel=1e-6)
    np.testing.assert_allclose(other.slope, one.slope, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(other.values, one.values, rtol=1e-5)
    np.testing.assert_allclose(other.y["lower"], one.y["lower"], rtol=1e-4, atol=1e-6)
    again = parts(at, other.y)
    assert again is not None
    assert again.value == pytest.approx(one.value, rel=1e-6)


def test_what_a_sample_finds_is_near_the_minimum_for_all_blocks():
    case = quadratic_blocks(m=300, d_x=3, d_y=3, rows=20)
    state = run(case, steps=20).state
    found = finish(case.problem, state, case.x0, Effort(100, 1000))
    assert isinstance(found, Finished)
    assert found.report.judges == 100
    assert "on 100 other blocks" in str(found.report)
    assert gap(case, found.x) < 0.03
    np.testing.assert_allclose(found.y, case.lower_solution(found.x), rtol=1e-3, atol=1e-4)


def test_a_search_on_a_sample_that_was_cut_says_so():
    case = logistic_blocks(m=300, d_x=6, d_y=6, rows=30, conditioning=100.0)
    state = run(case, steps=20).state
    x0 = case.x0 + 3
    found = finish(case.problem, state, x0, Effort(100, 35))
    assert isinstance(found, Finished)
    assert found.report.was_cut
    assert "steps=2000 instead of 500" in found.report.doubt(500)
    for nearly in (60, 600):
        found = finish(case.problem, state, x0, Effort(100, nearly))
        assert isinstance(found, Finished)
        assert not found.report.doubt(500)


def test_what_other_blocks_do_not_confirm_is_not_taken():
    count = 192
    truth = jnp.asarray(np.random.default_rng(0).normal(size=count), jnp.float32)
    problem = bx.Problem(  # every block has an entry of x to itself, and a part of all others
        upper=lambda x, y, block, batch: (y[0] - truth[block]) ** 2 + jnp.mean((x - x[block]) ** 2),
        lower=lambda x, y, block, batch: jnp.sum((y - x[block]) ** 2),
        blocks=jnp.arange(count),
    )
    x0 = jnp.zeros(count)
    state = bx.minimize(problem, x0, jnp.zeros((count, 1)), steps=20, progress=None).state
    state = eqx.tree_at(lambda one: one.x, state, x0)
    assert isinstance(finish(problem, state, x0, Effort(count, 1000)), Finished)
    kept = finish(problem, state, x0, Effort(64, 1000))
    assert isinstance(kept, Kept)
    np.testing.assert_allclose(kept.y, 0, atol=1e-6)  # x0, not those of the state, which has moved


def test_a_sample_does_not_move_an_x_that_is_best_already():
    case = ridge_blocks(m=300, d_x=3, d_y=3, rows=20)
    state = run(case, steps=20).state
    best = finish(case.problem, state, case.x0, Effort(300, 1000))
    assert isinstance(best, Finished)
    state = eqx.tree_at(lambda one: one.x, state, best.x)
    assert isinstance(finish(case.problem, state, case.x0, Effort(100, 1000)), Kept)


def test_an_error_in_exact_steps_leaves_the_answer_of_the_run(monkeypatch):
    def fails(*given):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("bilevax._run.ending.finish", fails)
    case = quadratic_blocks(m=6, d_x=3, d_y=3, rows=10)
    with pytest.warns(bx.AccuracyWarning, match="out of memory"):
        result = bx.minimize(case.problem, case.x0, case.y0, steps=600, progress=None)
    np.testing.assert_array_equal(result.x, result.state.x)


def test_an_error_in_the_verification_does_not_lose_the_run(monkeypatch):
    def fails(*given, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("bilevax._run.ending.verify", fails)
    case = quadratic_blocks(m=6, d_x=3, d_y=3, rows=10)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        bx.minimize(case.problem, case.x0, case.y0, steps=600, progress=None)
    assert int(caught.value.result.state.step) == 600
