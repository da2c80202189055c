"""Tuning finds the setting with the least F, whatever f the runs track."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_forms import Quadratic

import bilevax as bx

BLOCKS = jnp.arange(8.0).reshape(4, 2)
X0 = jnp.zeros(2)
LEAST = 10.0  # of F, at the mean of the blocks


def upper(x, y, block, batch):
    return jnp.sum((y - block) ** 2)


def lower(x, y, block, batch):
    return jnp.sum((y - x) ** 2)


PROBLEM = bx.Problem(upper, lower, BLOCKS)
CASE = Quadratic(m=12, rows=7, d_y=3, d_x=3)
PLAN = {"steps": 80, "blocks_per_step": 3, "batch_size": 3, "progress": None}


def tune(**changes):
    given = {"solver": bx.BSVRBv2(0.1), "steps": 200, "progress": None} | changes
    return bx.tune(PROBLEM, X0, given.pop("y0", BLOCKS), **given)


def test_the_judge_is_f_at_the_lower_solutions_and_not_the_f_that_a_run_tracks():
    # y starts where f is least, and stays there if the lower step is tiny: the tracked f is 0, and x stays.
    grid = {"lower_step": [1e-9, 0.3]}
    tracked = bx.sweep(
        PROBLEM, X0, BLOCKS, solver=lambda lower_step: bx.BSVRBv2(0.1, lower_step=lower_step), settings=grid,
        steps=200, keys=jax.random.key(0)[None], progress=None,
    )  # fmt: skip
    assert tracked.best("objective") == {"lower_step": 1e-9}
    tuned = tune(grid=grid)
    assert tuned.settings == {"lower_step": 0.3}
    assert tuned.objective == pytest.approx(LEAST, rel=1e-3)
    assert tuned.objective == pytest.approx(float(bx.objective(PROBLEM, tuned.x)), rel=1e-5)
    assert tuned.start == pytest.approx(float(bx.objective(PROBLEM, X0)), rel=1e-5)
    assert tuned.trials[1].objective[-1] == pytest.approx(tuned.start, rel=1e-3)


def test_minimize_repeats_the_best_run_and_a_second_call_gives_the_same(x64):
    case = Quadratic(m=12, rows=7, d_y=3, d_x=3, dtype=np.float64)
    given = PLAN | {"key": jax.random.key(5)}
    grid = {"upper_step": [0.001, 0.02, 0.05], "beta": [0.1, 0.5]}
    tuned, again = (
        bx.tune(case.problem, case.x0, case.y0, solver=bx.BSVRBv2(), grid=grid, **given) for _ in range(2)
    )
    result = bx.minimize(case.problem, case.x0, case.y0, solver=tuned.solver, **given)
    np.testing.assert_allclose(tuned.x, result.x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tuned.y, result.y, rtol=1e-9, atol=1e-12)
    on = bx.advance(case.problem, tuned.solver, tuned.state, 3)
    assert int(on.step) == 83
    assert tuned.trials == again.trials
    np.testing.assert_array_equal(tuned.x, again.x)


def test_halving_takes_the_better_half_further_and_keeps_all_trials_in_the_table():
    grid = {"upper_step": [0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.2]}
    tuned = tune(grid=grid)
    assert tuned.rungs == (50, 100, 200)
    assert [len(trial.objective) for trial in tuned.trials] == [3, 3, 2, 1, 1, 1]
    assert [trial.steps for trial in tuned.trials] == [200, 200, 100, 50, 50, 50]
    assert [trial.outcome for trial in tuned.trials] == 2 * ["finished"] + 4 * ["dropped"]
    assert sorted(trial.settings["upper_step"] for trial in tuned.trials) == grid["upper_step"]
    assert tuned.trials[0].settings == tuned.settings
    table = str(tuned).splitlines()
    assert table[0].startswith("F of 4 blocks, 35 at x0")
    names = [word.strip() for word in table[1].split("  ") if word]
    assert names == ["upper_step", "F after 50", "F after 100", "F after 200", "outcome"]
    assert len({len(line) for line in table[1:]}) == 1
    assert list(tuned.frame()["outcome"]) == [trial.outcome for trial in tuned.trials]
    whole = tune(grid=grid, rungs=1)
    assert whole.rungs == (200,)
    assert all(trial.steps == 200 for trial in whole.trials)


def test_trials_that_diverge_are_dropped():
    tuned = tune(grid={"upper_step": [0.1], "lower_step": [1e5, 0.3, 1e9]})
    assert tuned.settings == {"upper_step": 0.1, "lower_step": 0.3}
    assert [trial.outcome for trial in tuned.trials] == ["finished", "diverged", "diverged"]
    assert all(np.isnan(trial.objective[-1]) for trial in tuned.trials[1:])


def test_if_all_trials_diverge_the_error_says_so():
    with pytest.raises(ValueError, match="all 2 trials diverged: put smaller steps into the grid"):
        tune(grid={"lower_step": [1e5, 1e9]})


def test_lower_problems_that_cannot_be_solved_are_named():
    flat = bx.Problem(upper, lambda x, y, block, batch: jnp.sum(y * x) - jnp.sum(y), BLOCKS)
    with pytest.raises(ValueError, match="no trial could be judged: some lower problems could not be solved"):
        bx.tune(flat, X0, BLOCKS, solver=bx.SOBA(0.01, lower_step=0.1), steps=8, progress=None)


def test_the_best_of_bad_trials_is_a_warning():
    with pytest.warns(bx.AccuracyWarning, match="the best of 1 trials is worse than x0: F is"):
        bx.tune(
            PROBLEM, X0, jnp.zeros((4, 2)), solver=bx.BSVRBv2(),
            grid={"upper_step": [lambda step: -0.05]}, steps=30, progress=None,
        )  # fmt: skip


def test_left_out_it_tries_speeds_of_the_automatic_step_of_the_default_solver():
    tuned = tune(solver=None)
    assert sorted(trial.settings["speed"] for trial in tuned.trials) == [0.1, 0.3, 1.0, 3.0, 10.0]
    assert isinstance(tuned.solver, bx.BlockNewton)
    assert tuned.objective < tuned.start
    steps = [trial.settings["upper_step"] for trial in tune(solver=bx.BSVRBv2(0.1)).trials]
    assert sorted(steps) == pytest.approx([0.01, 0.03, 0.1, 0.3, 1.0])


def test_choices_may_be_none_schedules_transformations_and_numbers_together():
    grid = {"upper_step": [None, 0.1, optax.adam(0.3), lambda step: 0.1], "alpha": [0.2, 0.9]}
    tuned = tune(grid=grid, rungs=1)
    assert len(tuned.trials) == 8
    for choice in grid["upper_step"]:
        assert sum(trial.settings["upper_step"] is choice for trial in tuned.trials) == 2
    plain, schedule = (
        {t.settings["alpha"]: t.objective for t in tuned.trials if t.settings["upper_step"] is choice}
        for choice in (grid["upper_step"][1], grid["upper_step"][3])
    )
    assert plain[0.2] == pytest.approx(schedule[0.2], rel=1e-5)
    assert "GradientTransformation" in str(tuned)


def test_the_solver_may_be_a_class_a_function_or_restarted():
    assert tune(solver=bx.BSVRBv2, grid={"upper_step": [0.1]}).settings == {"upper_step": 0.1}
    made = tune(solver=lambda rate: bx.BSVRBv2(optax.adam(rate)), grid={"rate": [1e-9, 0.3]})
    assert made.settings == {"rate": 0.3}
    restarted = tune(solver=bx.Restart(bx.BSVRBv2(), first=20, stages=2), grid={"upper_step": [0.0, 0.1]})
    assert restarted.solver.solver.upper_step == 0.1
    assert restarted.solver.first == 20
    static = tune(solver=bx.Restart(bx.BSVRBv2(0.1), first=20, stages=2), grid={"stages": [1, 3]})
    assert {trial.settings["stages"] for trial in static.trials} == {1, 3}


def test_few_of_many_blocks_are_drawn_by_the_key():
    blocks = jax.random.normal(jax.random.key(1), (200, 2))
    problem = bx.Problem(upper, lower, blocks)

    def drawn(key, count=None):
        options = {"solver": bx.BSVRBv2(0.1), "grid": {"beta": [0.3]}, "steps": 4, "progress": None}
        return bx.tune(problem, X0, jnp.zeros((200, 2)), key=jax.random.key(key), blocks=count, **options)

    assert len(drawn(0).blocks) == 64
    few = drawn(0, 5)
    assert len(set(few.blocks.tolist())) == 5
    assert drawn(0, 5).blocks.tolist() == few.blocks.tolist() != drawn(1, 5).blocks.tolist()
    assert few.start == pytest.approx(float(jnp.mean(jnp.sum(blocks[few.blocks] ** 2, 1))), rel=1e-5)
    every = drawn(0, 1000)
    assert every.blocks.tolist() == list(range(200))
    assert every.objective == pytest.approx(float(bx.objective(problem, every.x)), rel=1e-5)


def test_progress_shows_how_many_trials_run_and_the_least_f():
    class Shown(list):
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, step, speed, metrics):
            self.append((step, metrics))

    shown = Shown()
    tuned = tune(grid={"upper_step": [0.0, 1e-3, 1e-2, 0.1]}, progress=shown)
    assert shown[0] == (4, {"trials": 4.0, "F": tuned.start})
    assert shown[-1][0] == 200
    assert shown[-1][1]["trials"] == 2.0
    assert shown[-1][1]["F"] == tuned.trials[0].objective[1]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"grid": {}}, TypeError, "grid must be a dict of values by name"),
        ({"grid": [0.1]}, TypeError, "grid must be a dict of values by name"),
        ({"grid": {"upper_step": []}}, ValueError, r"grid\['upper_step'\] must be a list of at least one"),
        ({"grid": {"upper_step": 0.1}}, ValueError, r"grid\['upper_step'\] must be a list of at least one"),
        ({"grid": {"upper_step": [-1.0]}}, ValueError, "upper_step must lie in"),
        (
            {"grid": {"tau": [0.1]}},
            ValueError,
            "hyper-parameters of BSVRBv2, which are upper_step, .*got tau",
        ),
        ({"grid": {"speed": [1.0], "upper_step": [0.1]}}, ValueError, "both speed and upper_step"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"rungs": 0}, ValueError, "rungs must be between 1 and 20"),
        ({"blocks": 0}, ValueError, "blocks must be at least 1"),
        ({"solver": 3}, TypeError, "solver must be a bilevax solver"),
        (
            {"solver": lambda beta: beta, "grid": {"beta": [1.0]}},
            TypeError,
            "solver must be a bilevax solver",
        ),
        ({"solver": lambda: bx.BSVRBv2()}, ValueError, "grid must be given if solver is a function"),
        ({"solver": bx.BSVRBv2(optax.adam(0.1))}, ValueError, "grid must be given if the upper_step"),
    ],
)
def test_bad_input_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        tune(**({"grid": {"upper_step": [0.1]}} if "solver" not in change else {}) | change)


def test_levels_with_slots_of_their_own_are_refused():
    level = bx.argmin(lower, slots=lambda block, batch: jnp.zeros((), int), count=1)
    problem = bx.Problem(lambda x, y, block, batch: jnp.sum(y["own"] ** 2), {"own": level}, 4)
    with pytest.raises(ValueError, match="tune needs one slot per block, got the lower level 'own'"):
        bx.tune(problem, X0, {"own": jnp.zeros((1, 2))}, steps=4, progress=None)
