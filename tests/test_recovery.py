"""A run that begins to blow up goes back, shortens the step that is too long, and goes on."""

import dataclasses
import json
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import Quadratic
from test_checkpoint import same_bits, saved_steps

import bilevax as bx
from bilevax._run.ending import _went_back_often

pytestmark = [
    pytest.mark.filterwarnings("ignore::bilevax.RecoveryWarning", "ignore::bilevax.AccuracyWarning"),
    pytest.mark.usefixtures("steps_alone"),
]
UPPER = [
    bx.BSVRBv1,
    bx.BSVRBv2,
    bx.MMBO,
    bx.SOBA,
    bx.MASOBA,
    bx.BlockNewton,
    bx.BlockSAGA,
    bx.BlockPAGE,
    bx.RSVRB,
]
LOWER = [bx.BSVRBv1, bx.BSVRBv2, bx.MMBO, bx.SOBA, bx.F2SA, bx.RSVRB]


def run(solver, steps=600, stop=None, case=None, **options):
    case = case or Quadratic(m=12, rows=10, d_y=3, d_x=3)
    options = {"blocks_per_step": 4, "batch_size": 5, "progress": None} | options
    stop = stop or bx.Stop(verify=False)
    return bx.minimize(case.problem, case.x0, case.y0, solver=solver, steps=steps, stop=stop, **options)


def improved(case, x):
    return np.linalg.norm(case.gradient(x)) < np.linalg.norm(case.gradient(case.x0))


@pytest.mark.parametrize("method", UPPER)
def test_too_long_an_upper_step_is_shortened(method):
    case = Quadratic(m=12, rows=10, d_y=3, d_x=3)
    result = run(method(upper_step=20.0), case=case, stop=bx.Stop(verify=True))
    assert result.outcome is bx.Outcome.FINISHED
    assert result.recoveries
    assert float(result.state.restraint.upper) < 1
    assert np.isfinite(result.x).all()
    assert improved(case, result.x) or result.verification.message


@pytest.mark.parametrize("method", LOWER)
def test_too_long_a_lower_step_is_shortened(method):
    result = run(method(upper_step=0.01, lower_step=30.0))
    assert result.outcome is bx.Outcome.FINISHED
    assert {one.what for one in result.recoveries} == {"lower_step"}
    assert float(result.state.restraint.lower) < 1
    assert float(result.state.restraint.upper) == 1


def test_a_restart_recovers_as_well():
    result = run(bx.Restart(bx.BSVRBv2(upper_step=20.0), first=100, stages=2))
    assert result.recoveries


def test_a_run_that_needs_no_recovery_is_not_changed():
    solver = bx.BSVRBv2(upper_step=0.05)
    guarded, free = run(solver), run(solver, stop=bx.Stop(verify=False, recover=False))
    same_bits(guarded, free)
    assert guarded.recoveries == ()


def test_recovery_can_be_switched_off():
    with pytest.raises(bx.DivergedError):
        run(bx.SOBA(upper_step=1e3), stop=bx.Stop(recover=False))


def test_recoveries_are_reported_and_warned_of():
    with pytest.warns(bx.RecoveryWarning, match=r"went back, from step \d+ to \d+, with 0.25 times"):
        result = run(bx.BSVRBv2(upper_step=20.0))
    (first, *_) = result.recoveries
    assert first.back_to < first.step
    assert first.what == "upper_step"
    assert first.factor == 0.25
    steps = result.history["step"]
    assert list(steps) == sorted(set(steps))


@pytest.mark.parametrize("cut", [26, 60, 143, 299])
def test_a_resumed_run_recovers_in_the_same_way(cut, tmp_path):
    solver = bx.BSVRBv2(upper_step=20.0)
    saving = bx.Checkpoint(tmp_path, steps=13, keep=1000)
    whole = run(solver, every=30, checkpoint=saving)
    assert whole.recoveries
    for step in saved_steps(tmp_path):
        if step > cut:  # the run was killed
            shutil.rmtree(tmp_path / f"step_{step}")
    resumed = run(solver, every=30, checkpoint=dataclasses.replace(saving, resume=True))
    same_bits(whole, resumed)
    assert resumed.recoveries == whole.recoveries
    np.testing.assert_array_equal(resumed.history["objective"], whole.history["objective"])


def test_checkpoints_of_steps_that_were_undone_are_deleted(tmp_path, monkeypatch):
    from bilevax._run.checkpoint_store import CheckpointStore

    seen, forget = [], CheckpointStore.forget_after

    def watched(store, step):
        forget(store, step)
        seen.append((step, saved_steps(tmp_path)))

    monkeypatch.setattr(CheckpointStore, "forget_after", watched)
    run(bx.BSVRBv2(upper_step=20.0), every=30, checkpoint=bx.Checkpoint(tmp_path, steps=5))
    assert seen
    assert all(all(one <= step for one in left) for step, left in seen)


def test_a_log_holds_what_the_history_holds(tmp_path):
    path = tmp_path / "log.jsonl"
    result = run(bx.BSVRBv2(upper_step=20.0), log=path)
    logged = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert logged == [int(step) for step in result.history["step"]]


def test_what_no_shorter_step_would_mend_is_not_tried_again(monkeypatch):
    monkeypatch.setattr("bilevax._run.minimize.check_finite", lambda *_: None)  # which names it before
    rows = np.ones((8, 3), np.float32)
    rows[5, 1] = np.nan
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(y**2),
        lower=lambda x, y, block, batch: jnp.sum((y - x - jnp.mean(batch, 0)) ** 2),
        blocks=4,
        lower_data=bx.PerBlock(rows, np.arange(5) * 2),
        means_over_rows=False,
    )
    with pytest.raises(bx.DivergedError, match="lower_data") as caught:
        bx.minimize(problem, jnp.ones(3), jnp.ones((4, 3)), steps=100, progress=None)
    assert caught.value.result.recoveries == ()


def test_a_large_state_is_guarded_only_if_asked(monkeypatch):
    from bilevax._run import recovery

    monkeypatch.setattr(recovery, "MOST_BYTES", 10)
    with pytest.raises(bx.DivergedError):
        run(bx.SOBA(upper_step=1e3))
    assert run(bx.SOBA(upper_step=20.0), stop=bx.Stop(recover=True, verify=False)).recoveries


def test_a_run_whose_steps_became_far_shorter_is_doubted():
    def doubt(*factors):
        recoveries = tuple(bx.Recovery(10 * k + 20, 10 * k, "upper_step", f) for k, f in enumerate(factors))
        return _went_back_often(types.SimpleNamespace(recoveries=recoveries))

    assert doubt() == doubt(0.25) == doubt(0.25, 0.0625) == ""
    assert "went back 2 times, and has taken 0.0001 times the upper_step since step 10" in doubt(0.25, 1e-4)
