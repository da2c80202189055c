"""The runner: what it measures, why it stops, and what it says when a run goes wrong."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import grouped
from closed_forms import Quadratic

import bilevax as bx
from bilevax.data import DataError
from bilevax.experiments.theorems.variants import SampledBSVRBv2

CASE = Quadratic(m=6, rows=7, d_y=3, d_x=3)
SOLVER = bx.BSVRBv2(upper_step=0.1)


def run(solver=SOLVER, **arguments):
    given = {"steps": 60, "every": 20, "key": jax.random.key(0), "progress": None, "blocks_per_step": 2}
    return bx.minimize(
        CASE.problem, CASE.x0, CASE.y0, solver=solver, **grouped(**(given | {"batch_size": 3} | arguments))
    )


def test_the_history_has_an_entry_every_so_many_steps():
    result = run(steps=50, metrics={"first": lambda problem, state: state.x[0]})
    assert result.history["step"].tolist() == [20, 40, 50]
    assert set(result.history) == {
        "step", "seconds", "objective", "gradient_norm", "lower_residual", "inverse_residual", "first",
    }  # fmt: skip
    assert result.history["first"][-1] == result.x[0]
    assert np.all(np.isfinite(result.history["objective"]))
    assert np.all(np.diff(result.history["seconds"]) > 0)
    assert result.outcome is bx.Outcome.FINISHED
    assert str(result.outcome) == "finished"


def test_the_history_is_also_a_frame_lines_on_disk_and_a_figure(tmp_path):
    result = run(log=tmp_path / "deep" / "run.jsonl")
    frame = result.history.frame()
    assert frame["step"].tolist() == [20, 40, 60]
    lines = (tmp_path / "deep" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["objective"] for line in lines] == frame["objective"].tolist()
    result.plot().savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
    with pytest.raises(KeyError, match="no 'loss' in the history"):
        result.history["loss"]


def test_the_objective_is_the_mean_of_f_over_the_steps():
    state, step, values = run(steps=0).state, jax.jit(SOLVER.step), []
    for _ in range(20):
        state, info = step(CASE.problem, state)
        values.append(float(info.objective))
    assert run(steps=20).history["objective"][0] == pytest.approx(np.mean(values), rel=1e-5)


def test_a_run_stops_when_the_gradient_is_small():
    result = run(steps=100_000, every=10, tolerance=1e-4, blocks_per_step=None, batch_size=None)
    assert result.outcome is bx.Outcome.CONVERGED
    assert result.history["gradient_norm"][-1] <= 1e-4 < result.history["gradient_norm"][-2]


def test_a_run_stops_when_its_time_is_up(monkeypatch):
    ticks = itertools.count(step=0.5)  # time passes whenever the runner looks at its clock
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    for module in ("run", "minimize"):
        monkeypatch.setattr(f"bilevax._run.{module}.time", clock)
    result = run(steps=10**9, every=10**9, seconds=4.0)
    assert result.outcome is bx.Outcome.TIME
    assert 0 < result.state.step < 10**9
    assert result.history["step"].tolist() == [result.state.step], "the end of a run is measured"


def test_a_run_stops_when_patience_ends_and_keeps_the_best_iterate():
    values = iter([3.0, 1.0, 2.0, 5.0, 4.0, 0.0])
    seen = []

    def measure(problem, state):
        seen.append(np.asarray(state.x))
        return next(values)

    result = run(steps=1000, metrics={"loss": measure}, patience=3, watch="loss")
    assert result.outcome is bx.Outcome.PATIENCE
    assert (result.best.step, result.best.value) == (40, 1.0)
    np.testing.assert_array_equal(result.best.x, seen[1])
    assert result.state.step == 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_the_run_and_returns_what_there_is(number, capsys):
    def measure(problem, state):
        if state.step == 40:
            os.kill(os.getpid(), number)
        return 0.0

    before = signal.getsignal(number)
    result = run(steps=10_000, metrics={"signal": measure})
    assert result.outcome is bx.Outcome.INTERRUPTED
    assert result.state.step == 40
    assert signal.getsignal(number) is before
    (line,) = capsys.readouterr().err.splitlines()
    assert f"interrupted by {number.name} at step 40 of 10000" in line
    assert "bx.advance continues" in line
    assert "bx.Stop(raise_on_interrupt=True)" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_can_raise_and_carries_the_result(number, capsys):
    def measure(problem, state):
        if state.step == 40:
            os.kill(os.getpid(), number)
        return 0.0

    with pytest.raises(
        KeyboardInterrupt, match=f"interrupted by {number.name} at step 40 of 10000"
    ) as caught:
        run(steps=10_000, metrics={"signal": measure}, stop=bx.Stop(raise_on_interrupt=True))
    assert caught.value.result.outcome is bx.Outcome.INTERRUPTED
    assert caught.value.result.state.step == 40
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("solver", "quantity"),
    [
        (bx.BSVRBv2(upper_step=0.1, lower_step=50.0, inverse_step=0.1), "lower_step"),
        (bx.BSVRBv2(upper_step=0.1, inverse_step=50.0), "inverse_step"),
        (bx.MMBO(upper_step=0.1, inverse_step=50.0), "inverse_step"),
        (bx.BSVRBv2(upper_step=1e30), "upper_step"),
        (bx.RSVRB(upper_step=1e20), "upper_step"),
    ],
)
def test_a_diverged_run_says_what_went_wrong_and_where_to_look(solver, quantity):
    with pytest.raises(
        bx.DivergedError, match=rf"diverged between steps \d+ and \d+.*look at {quantity}, or"
    ) as error:
        run(solver, steps=100_000, recover=False)
    assert error.value.result.outcome is bx.Outcome.DIVERGED
    result = run(solver, steps=100_000, throw=False, recover=False)
    assert result.outcome is bx.Outcome.DIVERGED
    assert result.state.step < 100_000


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_row_that_is_not_finite_ends_a_run_whose_f_is_bounded(level, value, tmp_path, monkeypatch):
    """f never shows it, whatever x and y are; no checkpoint may hold it. The look before the run is left out,
    as it asks about one row of each array."""
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr("bilevax._run.minimize.check_finite", lambda *_: None)
    rows = {"upper": np.ones((20, 2), np.float32), "lower": np.ones((20, 2), np.float32)}
    rows[level][13, 1] = value
    problem = bx.Problem(
        lambda x, y, block, batch: jnp.mean(jnp.nan_to_num(jnp.tanh(y * batch), nan=0.5)),
        lambda x, y, block, batch: jnp.mean((y - x * block - batch) ** 2),
        jnp.arange(4.0),
        bx.Shared(rows["upper"]),
        bx.Shared(rows["lower"]),
        means_over_rows=False,
    )
    solver, start = bx.BSVRBv2(0.1, lower_step=0.1, inverse_step=0.1), (jnp.ones(2), jnp.zeros((4, 2)))
    arguments = {"key": jax.random.key(0), "batch_size": 1, "blocks_per_step": 1, "initial_batch_size": 0}
    arguments |= {"solver": solver, "progress": None, "checkpoint": tmp_path, "save_every": 1, "resume": True}
    with pytest.raises(bx.DivergedError, match=rf"row 13 of {level}_data is not finite"):
        bx.minimize(problem, *start, steps=400, every=1, **grouped(**arguments))
    saved = max(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*"))
    kept = bx.minimize(problem, *start, steps=saved, every=1, **grouped(**arguments))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept.state.levels))
    assert np.isfinite(kept.x).all()


def test_a_diverged_error_can_be_pickled():
    with pytest.raises(bx.DivergedError) as caught:
        run(bx.BSVRBv2(upper_step=1e30), steps=10_000, recover=False)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.result.outcome is bx.Outcome.DIVERGED
    assert again.result.state.step == caught.value.result.state.step


def test_every_error_of_the_package_can_be_pickled():
    for error in (bx.DivergedError("grew", None), bx.CheckpointError("of another run"), DataError("bad")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize("value", [None, "0.5", b"1", [1.0], np.ones(2), 1j, {}, lambda: 1.0])
def test_a_metric_must_return_one_number(value):
    with pytest.raises(TypeError, match=r"metrics\['odd'\] must return one number, got"):
        run(metrics={"odd": lambda problem, state: value})


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_debug_infs"])
def test_a_good_run_passes_the_debug_modes_of_jax(name):
    expected = run().x
    jax.config.update(name, True)
    try:
        np.testing.assert_allclose(run(metrics={"size": lambda p, state: jnp.sum(state.x)}).x, expected, 1e-5)
    finally:
        jax.config.update(name, False)


def test_a_run_that_jax_stops_at_a_nan_carries_its_result():
    jax.config.update("jax_debug_nans", True)
    try:
        # JAX stops a program unless it was compiled before the mode was set; then the run itself stops.
        with pytest.raises(FloatingPointError, match=r"nan|not finite") as caught:
            run(bx.BSVRBv2(upper_step=1e30), steps=1000)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert caught.value.result.state.step < 1000


@pytest.mark.parametrize(
    ("use", "module", "extra"),
    [
        (lambda result: result.history.frame(), "pandas", "data"),
        (lambda result: result.plot(), "matplotlib.figure", "experiments"),
        (lambda result: run(progress="bar"), "rich.progress", "data"),
        (lambda result: run(log=bx.TensorBoard("board")), "tensorboardX.proto.event_pb2", "tensorboard"),
        (lambda result: run(checkpoint="folder"), "orbax.checkpoint", "checkpoints"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    use, module, extra, monkeypatch, tmp_path
):
    result = run()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'pip install "bilevax\[{extra}\]"'):
        use(result)


def test_a_run_over_no_steps_returns_the_start():
    result = run(steps=0)
    np.testing.assert_array_equal(result.x, CASE.x0)
    assert result.outcome is bx.Outcome.FINISHED


@pytest.mark.parametrize("method", [bx.BSVRBv1, SampledBSVRBv2, bx.RSVRB])
def test_a_step_that_throws_x_away_is_not_blamed_on_the_lower_level(method):
    """Blocks that are not lazy move within the step that finds x gone: they are no cause of it."""
    solver = method(upper_step=lambda t: jnp.where(t == 30, jnp.inf, 0.1))
    with pytest.raises(bx.DivergedError, match="look at upper_step"):
        run(solver, recover=False)


def test_a_schedule_that_gives_up_is_divergence_of_f():
    solver = bx.BSVRBv2(upper_step=lambda t: jnp.where(t < 30, 0.1, jnp.nan))
    with pytest.raises(bx.DivergedError, match=r"between steps .* x is not finite"):
        run(solver, recover=False)
