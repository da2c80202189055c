"""Checkpoints: the same bits after any stop, and clear words when something is wrong."""

from __future__ import annotations

import multiprocessing
import shutil
import signal

import jax
import numpy as np
import optax
import pytest
from calls import grouped
from closed_forms import Quadratic

import bilevax as bx
from bilevax._run.checkpoint_files import read_meta

pytest.importorskip("orbax.checkpoint")

CASE = Quadratic(m=6, rows=7, d_y=3, d_x=3)
SOLVERS = {
    "BSVRBv1": bx.BSVRBv1(upper_step=0.05),
    "BSVRBv2": bx.BSVRBv2(upper_step=0.05),
    "RSVRB": bx.RSVRB(upper_step=0.05),
    "BlockPAGE": bx.BlockPAGE(upper_step=0.05),
    "BlockSAGA": bx.BlockSAGA(upper_step=0.05),
    "RE-BSVRBv2": bx.Restart(bx.BSVRBv2(upper_step=0.05), first=40, stages=4),
    "Adam": bx.BSVRBv2(upper_step=optax.adam(0.01)),
}


def run(solver=SOLVERS["BSVRBv2"], **arguments):
    given = {"steps": 200, "every": 20, "key": jax.random.key(0), "progress": None}
    given |= {"blocks_per_step": 2, "batch_size": 3}
    return bx.minimize(CASE.problem, CASE.x0, CASE.y0, solver=solver, **grouped(**(given | arguments)))


def same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert one.history["objective"].tolist() == other.history["objective"].tolist()
    assert one.history["step"].tolist() == other.history["step"].tolist()


@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(name, tmp_path):
    whole = run(SOLVERS[name])
    run(SOLVERS[name], steps=60, checkpoint=tmp_path)
    resumed = run(SOLVERS[name], checkpoint=tmp_path, resume=True, save_every=50)
    same_bits(whole, resumed)


def test_resuming_without_a_checkpoint_starts_anew_and_a_finished_run_returns_at_once(tmp_path):
    first = run(checkpoint=tmp_path, resume=True)
    again = run(checkpoint=tmp_path, resume=True)
    same_bits(first, again)
    assert first.steps_per_second > 0
    assert again.steps_per_second == pytest.approx(first.steps_per_second)


def test_patience_and_the_best_iterate_survive(tmp_path):
    settings = {"patience": 100, "watch": "gradient_norm"}
    whole = run(**settings)
    run(steps=60, checkpoint=tmp_path, **settings)
    resumed = run(checkpoint=tmp_path, resume=True, **settings)
    assert (whole.best.step, whole.best.value) == (resumed.best.step, resumed.best.value)
    np.testing.assert_array_equal(whole.best.x, resumed.best.x)


def test_only_the_latest_are_kept(tmp_path):
    run(checkpoint=tmp_path, save_every=40, keep=2)
    assert saved_steps(tmp_path) == [160, 200]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"solver": SOLVERS["BSVRBv1"]}, "solver.class is BSVRBv2 there and BSVRBv1 here"),
        ({"solver": bx.BSVRBv2(upper_step=0.07)}, r"solver.upper_step is 0.05 there and 0.07 here"),
        ({"blocks_per_step": 3}, "sampling is 2 of 6 blocks"),
        ({"key": jax.random.key(1)}, "key is"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(change, words, tmp_path):
    run(steps=40, checkpoint=tmp_path)
    with pytest.raises(bx.CheckpointError, match=words):
        run(**change, checkpoint=tmp_path, resume=True)


def saved_steps(folder):
    names = [path.name.removeprefix("step_") for path in folder.glob("step_*")]
    return sorted(int(name) for name in names if name.isdecimal())


def damage(folder, how):
    if how == "no notes":
        shutil.rmtree(folder / "meta")
    for path in [path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d"]:
        content = path.read_bytes()
        middle = len(content) // 2
        if how == "truncated":
            path.write_bytes(content[:middle])
        elif how == "flipped":
            path.write_bytes(
                content[:middle]
                + bytes(b ^ 0xFF for b in content[middle : middle + 8])
                + content[middle + 8 :]
            )
        elif how == "missing":
            path.unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "no notes"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(how, tmp_path):
    whole = run()
    run(steps=120, checkpoint=tmp_path, save_every=40)
    damage(tmp_path / "step_120", how)
    with pytest.warns(UserWarning, match="120 is damaged"):
        resumed = run(checkpoint=tmp_path, resume=True)
    same_bits(whole, resumed)


def test_any_flipped_bit_of_the_metadata_is_found(tmp_path):
    run(steps=40, checkpoint=tmp_path, patience=5)
    file = tmp_path / "step_40" / "meta" / "metadata"
    content, rng = file.read_bytes(), np.random.default_rng(0)
    good, unnoticed = read_meta(tmp_path / "step_40"), 0
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            assert read_meta(tmp_path / "step_40") == good
            unnoticed += 1
        except ValueError:
            pass
    assert len(content) > 1000
    assert unnoticed < 5, "a bit that means nothing, such as the case of an exponent's e"


@pytest.mark.parametrize(
    ("old", "new"),
    [('"strata": 1', '"strata": 3'), ('"best": [0', '"best": [1'), ('"running": ', '"running": 1')],
)
def test_a_change_in_the_metadata_is_damage(old, new, tmp_path):
    settings = {"patience": 100, "metrics": {"loss": lambda problem, state: 0.0}, "watch": "loss"}
    run(steps=80, checkpoint=tmp_path, save_every=40, **settings)
    file = tmp_path / "step_80" / "meta" / "metadata"
    text = file.read_text().replace('":', '": ').replace('":  ', '": ')
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    with pytest.warns(UserWarning, match="80 is damaged"):
        resumed = run(checkpoint=tmp_path, resume=True, **settings)
    same_bits(run(**settings), resumed)
    assert resumed.best.value == 0.0
    assert (tmp_path / "damaged_step_80").is_dir()


def test_if_all_are_damaged_the_error_says_so(tmp_path):
    run(steps=40, checkpoint=tmp_path)
    damage(tmp_path / "step_40", "truncated")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(bx.CheckpointError, match=r"all .* are damaged"),
    ):
        run(checkpoint=tmp_path, resume=True)


def test_a_directory_in_use_is_refused(tmp_path):
    def measure(problem, state):
        with pytest.raises(bx.CheckpointError, match="in use by another run"):
            run(checkpoint=tmp_path)
        return 0.0

    run(steps=20, checkpoint=tmp_path, metrics={"another": measure})


def test_a_new_run_is_not_mixed_with_an_old_one(tmp_path):
    run(steps=40, checkpoint=tmp_path)
    with pytest.raises(bx.CheckpointError, match="holds checkpoints of steps"):
        run(checkpoint=tmp_path)


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    run(steps=40, checkpoint=tmp_path)
    other = Quadratic(m=6, rows=7, d_y=3, d_x=3, seed=1)
    with pytest.raises(bx.CheckpointError, match=r"data\..* is"):
        bx.minimize(
            other.problem,
            CASE.x0,
            CASE.y0,
            solver=SOLVERS["BSVRBv2"],
            steps=200,
            key=jax.random.key(0),
            progress=None,
            blocks_per_step=2,
            batch_size=3,
            checkpoint=bx.Checkpoint(tmp_path, resume=True),
        )


def test_rows_of_another_width_are_other_data_even_if_they_are_stored_alike(tmp_path):
    rows = np.random.default_rng(0).integers(0, 2, (2000, 60)).astype(np.float32)
    wider = np.pad(rows, ((0, 0), (0, 4)))
    np.testing.assert_array_equal(bx.Shared(rows).packed.stored, bx.Shared(wider).packed.stored)

    def run_on(rows, **arguments):
        problem = bx.Problem(
            lambda x, y, block, batch: (y - block) ** 2 + x**2,
            lambda x, y, block, batch: (y - x) ** 2 * batch.mean(),
            np.arange(4.0),
            lower_data=bx.Shared(rows),
        )
        start = {"y0": np.zeros(4), "key": jax.random.key(0), "blocks_per_step": 2, "batch_size": 3}
        bx.minimize(
            problem,
            1.0,
            solver=SOLVERS["BSVRBv2"],
            progress=None,
            **grouped(**start, **arguments, checkpoint=tmp_path),
        )

    run_on(rows, steps=10)
    with pytest.raises(bx.CheckpointError, match="rows is"):
        run_on(wider, steps=20, resume=True)


def test_patience_cannot_come_and_go(tmp_path):
    run(steps=40, checkpoint=tmp_path)
    with pytest.raises(bx.CheckpointError, match="written with other options of Stop, patience or recover"):
        run(checkpoint=tmp_path, resume=True, patience=5)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(bx.CheckpointError, match="cannot write checkpoints"):
        run(checkpoint=tmp_path / "file" / "run")


def test_a_diverged_run_leaves_the_last_finite_checkpoint(tmp_path):
    solver = bx.BSVRBv2(upper_step=0.05, lower_step=50.0)
    with pytest.raises(bx.DivergedError):
        run(solver, steps=10_000, checkpoint=tmp_path, save_every=1, recover=False)
    kept = saved_steps(tmp_path)
    assert kept
    with pytest.raises(bx.DivergedError):
        run(solver, steps=10_000, checkpoint=tmp_path, resume=True, recover=False)


# Where processes are forked that have all imports behind them; JAX has not begun to compute in it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["bilevax", "optax", "orbax.checkpoint", "pytest"])


def live(pipe, name, folder, cache, **arguments):
    """A run that tells the step whenever it measures, and saves at any distance from there."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    measure = {"alive": lambda problem, state: pipe.send(int(state.step)) or 0.0}
    run(SOLVERS[name], checkpoint=folder, resume=True, save_every=7, metrics=measure, **arguments)
    for _ in range(6):  # as many as anyone waits for
        pipe.send(arguments["steps"])
    signal.pause()  # too fast: it is killed all the same


@pytest.mark.parametrize("name", ["BSVRBv1", "BSVRBv2", "RSVRB", "RE-BSVRBv2", "Adam"])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(name, tmp_path):
    """SIGKILL at random moments while steps are taken and checkpoints written, six times per method."""
    steps, kills = 400, 6
    rng = np.random.default_rng(sum(map(ord, name)))
    folder, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    reached = []
    for _ in range(kills):
        reports, pipe = FORKS.Pipe(duplex=False)
        process = FORKS.Process(
            target=live, args=(pipe, name, folder, cache), kwargs={"steps": steps, "every": 10}
        )
        process.start()
        pipe.close()
        reached.append([reports.recv() for _ in range(rng.integers(1, 6))][-1])
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert max(reached) > 50, "no run went on from where another was killed"
    killed = run(SOLVERS[name], steps=steps, every=10, checkpoint=folder, resume=True)
    same_bits(run(SOLVERS[name], steps=steps, every=10), killed)
