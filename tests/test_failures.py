"""What the world does to a run: full disks, folders that cannot be written, signals, other machines."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from devices import several_devices
from test_checkpoint import SOLVERS, run, same_bits, saved_steps

import bilevax as bx

pytest.importorskip("orbax.checkpoint")

TESTS = os.path.dirname(__file__)


def python(program, *arguments, **environment):
    """Starts a Python program that can import the tests."""
    source = f"import sys; sys.path.insert(0, {TESTS!r})\n" + textwrap.dedent(program)
    return subprocess.Popen(
        [*arguments, sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


FULL_DISK = """
    import pathlib
    import bilevax as bx
    from test_checkpoint import run, saved_steps, SOLVERS
    from closed_forms import Quadratic
    import test_checkpoint
    folder = pathlib.Path({folder!r})
    test_checkpoint.CASE = Quadratic(m=40, rows=7, d_y=24, d_x=3)

    def fill(problem, state):
        if state.step >= 100:  # again and again: a deleted checkpoint makes room
            try:
                with (folder / "filler").open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            except OSError:
                pass
        return 0.0

    try:
        options = {{"save_every": 10, "every": 10, "keep": {keep}, "metrics": {{"fill": fill}}}}
        run(SOLVERS["BSVRBv1"], checkpoint=folder / "run", **options)
    except bx.CheckpointError as error:
        print(error)
        print("result", int(error.result.state.step), error.result.outcome)
    else:
        print("no error")
    (folder / "filler").unlink()
    kept = saved_steps(folder / "run")
    print("kept", *kept)
    resumed = run(SOLVERS["BSVRBv1"], steps=kept[-1] + 10, checkpoint=folder / "run", resume=True, keep=2)
    whole = run(SOLVERS["BSVRBv1"], steps=kept[-1] + 10)
    print("same", (resumed.x == whole.x).all())
"""


@contextlib.contextmanager
def small_disk(size="8m"):
    """A prefix for a command, under which a folder is a disk of its own; skips where that is not allowed."""
    folder = tempfile.mkdtemp()
    mount = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$0" "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
    try:
        unshare = shutil.which("unshare")
        if not unshare or subprocess.run([*prefix, "true"], capture_output=True).returncode:
            pytest.skip("this machine does not let a test mount a small disk")
        yield folder, prefix
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("keep", [1, 20])
def test_a_full_disk_is_a_clear_error_and_harms_nothing_written_before(keep):
    with small_disk() as (folder, prefix):
        process = python(FULL_DISK.format(folder=folder, keep=keep), *prefix)
        out, errors = process.communicate()
    assert process.returncode == 0, errors
    lines = out.splitlines()
    assert "could not be written" in lines[0], out
    assert "the disk is full" in lines[0]
    assert f"steps {[int(step) for step in lines[2].split()[1:]]} are unharmed" in lines[0]
    assert lines[1].endswith("interrupted")
    assert len(lines[2].split()) > 1, "no checkpoint was kept"
    assert lines[3] == "same True"


@contextlib.contextmanager
def as_nobody():
    """Without the rights of root, to whom no folder is closed."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def read_only():
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_directory_is_refused_before_any_step(read_only):
    seen = []
    with (
        as_nobody(),
        pytest.raises(bx.CheckpointError, match=r"cannot write .*Permission denied"),
    ):
        run(checkpoint=read_only, metrics={"seen": lambda problem, state: seen.append(1) or 0.0})
    with as_nobody(), pytest.raises(bx.CheckpointError, match="cannot write checkpoints to"):
        run(checkpoint=read_only / "deeper", metrics={"seen": lambda problem, state: seen.append(1) or 0.0})
    assert not seen


def test_a_log_that_cannot_be_written_is_refused_before_any_step(read_only):
    seen = []
    with as_nobody(), pytest.raises(PermissionError):
        run(log=read_only / "log.jsonl", metrics={"seen": lambda problem, state: seen.append(1) or 0.0})
    assert not seen


def test_checkpoints_of_a_folder_that_became_read_only_stay(tmp_path):
    folder = Path(tempfile.mkdtemp())
    try:
        run(steps=40, checkpoint=folder)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        folder.chmod(0o555)
        with as_nobody(), pytest.raises(bx.CheckpointError):
            run(checkpoint=folder, resume=True)
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


SIGNALLED = """
    import os, signal, threading
    import bilevax._run.run as runner
    import test_checkpoint as t
    within, chunk = threading.Event(), runner.compiled_chunk
    runner._FIRST_CHUNK = 20_000

    def noted(inputs, state, steps, *others, **named):
        if steps:
            within.set()
        return chunk(inputs, state, steps, *others, **named)

    def send():
        within.wait()
        for _ in range({times}):
            os.kill(os.getpid(), {number})

    runner.compiled_chunk = noted
    threading.Thread(target=send, daemon=True).start()
    result = t.run(steps=10**8, every=10**8, checkpoint={folder!r})
    print(result.outcome, int(result.state.step), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_within_a_chunk_ends_it_saves_and_returns(number, tmp_path, monkeypatch):
    process = python(SIGNALLED.format(folder=str(tmp_path), number=int(number), times=1))
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    outcome, step = out.split()
    assert outcome == "interrupted"
    assert int(step) >= 20_000, "the chunk was not finished"
    # A run that is meant to be long is optimised, which may change its last digits: so are these two.
    monkeypatch.setattr("bilevax._run.run.work_of", lambda *given: math.inf)
    monkeypatch.setattr("bilevax._run.chunks.work_of", lambda *given: math.inf)
    arguments = {"steps": int(step) + 7, "every": 10**8}
    same_bits(run(**arguments), run(**arguments, checkpoint=tmp_path, resume=True))


SIGNALLED_TWICE = """
    import os, test_checkpoint as t
    from bilevax._run.checkpoint_store import CheckpointStore
    finish = CheckpointStore._finish

    def signalled(store):
        if store._pending is not None:
            os.kill(os.getpid(), {number})  # the second, while the checkpoint of step 60 is written
        finish(store)

    def measure(problem, state):
        if state.step == 60:
            CheckpointStore._finish = signalled
            os.kill(os.getpid(), {number})
        return 0.0

    t.run(checkpoint={folder!r}, resume=True, metrics={{"signal": measure}})
    print("returned")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_the_program_at_once_and_harms_no_checkpoint(number, tmp_path):
    run(steps=40, checkpoint=tmp_path, save_every=20)
    process = python(SIGNALLED_TWICE.format(folder=str(tmp_path), number=int(number)))
    out, errors = process.communicate()
    assert process.returncode == -number, errors
    assert "returned" not in out
    assert saved_steps(tmp_path)[:2] == [20, 40]
    same_bits(run(), run(checkpoint=tmp_path, resume=True))


DEVICES = """
    import jax, test_checkpoint as t
    print(len(jax.devices()))
    t.run(t.SOLVERS["BSVRBv1"], steps={steps}, checkpoint={folder!r}, resume=True)
"""


def test_a_checkpoint_restores_onto_another_number_of_devices(tmp_path):
    for steps, devices in ((60, 4), (120, 2)):
        process = python(DEVICES.format(folder=str(tmp_path), steps=steps), **several_devices(devices))
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        assert out.split() == [str(devices)]
    solver = SOLVERS["BSVRBv1"]
    resumed = run(solver, checkpoint=tmp_path, resume=True)  # on one device
    same_bits(run(solver), resumed)


def test_an_optax_transformation_with_other_numbers_is_another_run(tmp_path):
    import optax

    run(bx.BSVRBv2(upper_step=optax.adam(0.01)), steps=40, checkpoint=tmp_path)
    for other in (optax.adam(0.02), optax.adam(0.01, b1=0.8), optax.sgd(0.01)):
        with pytest.raises(bx.CheckpointError, match=r"belongs to another run.*upper_step"):
            run(bx.BSVRBv2(upper_step=other), checkpoint=tmp_path, resume=True)
    run(bx.BSVRBv2(upper_step=optax.adam(0.01)), checkpoint=tmp_path, resume=True)
