"""A sweep is the same as its runs one by one."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from closed_forms import Quadratic

import bilevax as bx

CASE = Quadratic(m=6, rows=7, d_y=3, d_x=3)
PLAN = {"steps": 60, "every": 20, "blocks_per_step": 2, "batch_size": 3, "progress": None}
KEYS = jax.random.split(jax.random.key(3), 2)

MAKERS = {
    "BSVRBv2": bx.BSVRBv2,
    "BSVRBv1": bx.BSVRBv1,
    "RSVRB": bx.RSVRB,
    "Adam": lambda upper_step, beta: bx.BSVRBv2(upper_step=optax.adam(upper_step), beta=beta),
    "BlockPAGE": lambda upper_step, beta: bx.BlockPAGE(upper_step, refresh_chance=beta / 5),
    "BlockSAGA": lambda upper_step, beta: bx.BlockSAGA(upper_step, lower_step=beta / 2),
    "RE-BSVRBv2": lambda **numbers: bx.Restart(bx.BSVRBv2(**numbers), first=20, stages=2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_run_of_a_sweep_is_the_run_that_minimize_makes(name, x64):
    case = Quadratic(m=6, rows=7, d_y=3, d_x=3, dtype=np.float64)
    settings = {"upper_step": [0.01, 0.05], "beta": [0.5, 0.1]}
    found = bx.sweep(
        case.problem, case.x0, case.y0, solver=MAKERS[name], settings=settings, keys=KEYS, **PLAN
    )
    assert found.history["objective"].shape == (2, 2, 3)
    assert found.step.tolist() == [20, 40, 60]
    for row in range(2):
        solver = MAKERS[name](**{key: float(column[row]) for key, column in settings.items()})
        for seed in range(2):
            one = bx.minimize(case.problem, case.x0, case.y0, solver=solver, key=KEYS[seed], **PLAN)
            np.testing.assert_allclose(found.x[row, seed], one.x, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found.y[row, seed], one.y, rtol=1e-9, atol=1e-12)
            for metric in ("objective", "gradient_norm"):
                np.testing.assert_allclose(found.history[metric][row, seed], one.history[metric], rtol=1e-9)


def test_problems_may_differ_by_seed():
    cases = [Quadratic(m=6, rows=7, d_y=3, d_x=3, seed=seed) for seed in range(2)]
    stacked = [case.problem for case in cases]
    upper, lower = stacked[0].upper, stacked[0].levels["lower"].function
    stacked = [bx.Problem(upper, lower, p.blocks, p.upper_data, p.lower_data[0]) for p in stacked]
    found = bx.sweep(
        stacked, CASE.x0, CASE.y0, solver=bx.BSVRBv2, settings={"upper_step": [0.05]}, keys=KEYS, **PLAN
    )
    for seed in range(2):
        one = bx.minimize(
            stacked[seed], CASE.x0, CASE.y0, solver=bx.BSVRBv2(upper_step=0.05), key=KEYS[seed], **PLAN
        )
        np.testing.assert_allclose(found.x[0, seed], one.x, rtol=2e-4, atol=1e-5)


def test_a_setting_that_diverges_disturbs_no_other_and_is_not_the_best():
    settings = {"upper_step": [0.05, 0.05], "lower_step": [0.05, 1e4]}
    found = bx.sweep(CASE.problem, CASE.x0, CASE.y0, solver=bx.BSVRBv2, settings=settings, keys=KEYS, **PLAN)
    assert np.isfinite(found.history["objective"][0]).all()
    assert found.scores("objective")[1] == np.inf
    assert found.best("objective")["lower_step"] == 0.05
    alone = bx.sweep(
        CASE.problem,
        CASE.x0,
        CASE.y0,
        solver=bx.BSVRBv2,
        settings={"upper_step": [0.05], "lower_step": [0.05]},
        keys=KEYS,
        **PLAN,
    )
    np.testing.assert_allclose(found.x[0], alone.x[0], rtol=1e-5)


def test_metrics_are_measured_for_every_run():
    metrics = {"size": lambda problem, state: (state.x**2).sum()}
    found = bx.sweep(
        CASE.problem,
        CASE.x0,
        CASE.y0,
        solver=bx.BSVRBv2,
        settings={"upper_step": [0.05]},
        keys=KEYS,
        metrics=metrics,
        **PLAN,
    )
    np.testing.assert_allclose(found.history["size"][0, :, -1], (found.x[0] ** 2).sum(-1), rtol=1e-5)


def test_a_metric_that_jax_cannot_trace_is_measured_run_by_run():
    settings = {"upper_step": [0.05, 0.05], "lower_step": [0.05, 1e4]}
    found = bx.sweep(
        CASE.problem,
        CASE.x0,
        CASE.y0,
        solver=bx.BSVRBv2,
        settings=settings,
        keys=KEYS,
        metrics={"F": lambda problem, state: bx.objective(problem, state.x), "steps": lambda _, s: s.step},
        **PLAN,
    )
    assert found.history["F"].shape == (2, 2, 3)
    for seed in range(2):
        exact = bx.objective(CASE.problem, found.x[0, seed])
        np.testing.assert_allclose(found.history["F"][0, seed, -1], exact, rtol=1e-6)
    assert found.scores("F")[1] == np.inf
    assert found.history["steps"][0, 0].tolist() == [20, 40, 60]


def test_a_run_that_a_metric_cannot_measure_is_nan_and_the_warning_names_it():
    def refuses(problem, state):
        if float(state.x[0]) != float(CASE.x0[0]):
            raise RuntimeError("no")
        return 0.0

    given = {"settings": {"upper_step": [0.0, 0.05]}, "keys": KEYS, "metrics": {"picky": refuses}}
    with pytest.warns(
        UserWarning, match=r"metrics\['picky'\] is NaN for setting 1 and seed 0 at step 20: no"
    ):
        found = bx.sweep(CASE.problem, CASE.x0, CASE.y0, solver=bx.BSVRBv2, **given, **PLAN)
    assert (found.history["picky"][0] == 0).all()
    assert np.isnan(found.history["picky"][1]).all()


def test_a_metric_that_is_no_number_is_refused_by_name():
    given = {"settings": {"upper_step": [0.05]}, "keys": KEYS, "metrics": {"whole": lambda _, state: state.x}}
    with pytest.raises(TypeError, match=r"metrics\['whole'\] must return one number, got shape \(3,\)"):
        bx.sweep(CASE.problem, CASE.x0, CASE.y0, solver=bx.BSVRBv2, **given, **PLAN)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"settings": {}}, TypeError, "settings must be a dict of columns"),
        ({"settings": {"upper_step": [0.1], "beta": [0.1, 0.2]}}, ValueError, "columns of one length"),
        ({"settings": {"upper_step": []}}, ValueError, "columns of one length"),
        ({"settings": {"upper_step": [-1.0]}}, ValueError, "upper_step must lie in"),
        ({"keys": jax.random.key(0)}, ValueError, "keys must be an array of random keys"),
        ({"keys": np.arange(3)}, ValueError, "keys must be an array of random keys"),
        ({"problem": [CASE.problem]}, ValueError, "one per key, got 1 for 2 keys"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"solver": lambda upper_step: upper_step}, TypeError, "solver must be a bilevax solver"),
    ],
)
def test_bad_input_is_refused(change, error, words):
    given = {"problem": CASE.problem, "solver": bx.BSVRBv2, "settings": {"upper_step": [0.1]}, "keys": KEYS}
    given |= PLAN | {"x0": CASE.x0, "y0": CASE.y0} | change
    with pytest.raises(error, match=words):
        bx.sweep(**given)


def test_if_every_setting_diverged_there_is_no_best():
    settings = {"upper_step": [0.05], "lower_step": [1e4]}
    found = bx.sweep(CASE.problem, CASE.x0, CASE.y0, solver=bx.BSVRBv2, settings=settings, keys=KEYS, **PLAN)
    with pytest.raises(ValueError, match="all diverged"):
        found.best("objective")


def test_a_second_sweep_of_the_same_functions_traces_nothing_anew():
    traced = []

    def upper(x, y, block, batch):
        traced.append(1)
        return CASE.problem.upper(x, y, block, batch)

    problem = bx.Problem(
        upper,
        CASE.problem.levels["lower"].function,
        CASE.problem.blocks,
        CASE.problem.upper_data,
        CASE.problem.lower_data[0],
    )

    def run(make, *steps):
        return bx.sweep(
            problem, CASE.x0, CASE.y0, solver=make, settings={"upper_step": steps}, keys=KEYS, **PLAN
        )

    first = run(bx.BSVRBv2, 0.05, 0.1)
    count = len(traced)
    again = run(bx.BSVRBv2, 0.05, 0.2)
    assert len(traced) == count
    np.testing.assert_array_equal(again.x[0], first.x[0])
    assert not np.array_equal(again.x[1], first.x[1])
    run(bx.MMBO, 0.05, 0.1)
    assert len(traced) > count


def test_a_maker_that_cannot_be_hashed_will_do():
    class Maker:
        __hash__ = None

        def __call__(self, upper_step):
            return bx.BSVRBv2(upper_step=upper_step)

    settings = {"upper_step": [0.05]}
    found, plain = (
        bx.sweep(CASE.problem, CASE.x0, CASE.y0, solver=make, settings=settings, keys=KEYS, **PLAN)
        for make in (Maker(), bx.BSVRBv2)
    )
    np.testing.assert_allclose(found.x, plain.x, rtol=1e-6)
