"""An error outside of the steps does not lose a run: its state is saved, and the error carries the result."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import sys
from pathlib import Path

import jax
import pytest
from test_checkpoint import damage, run, same_bits, saved_steps
from test_failures import python

import bilevax as bx
from bilevax._run import checkpoint_arrays, checkpoint_files
from bilevax._run.checkpoint_store import CheckpointStore

pytest.importorskip("orbax.checkpoint")


class OwnError(Exception):
    """An error of a user's own."""


def raising(error, at=2):
    """A function that raises at its n-th call, and returns 0 otherwise."""
    calls = []

    def call(*_):
        calls.append(1)
        if len(calls) == at:
            raise error
        return 0.0

    return call


class Failing:
    """A log and a display, one of whose methods raises at its n-th call."""

    def __init__(self, method, error, at=1):
        setattr(self, method, raising(error, at))

    def __enter__(self):
        return self.enter()

    def __exit__(self, *error):
        self.exit(*error)

    def enter(self):
        return self

    def exit(self, *error):
        pass

    def start(self, entries):
        pass

    def write(self, entry):
        pass

    def update(self, step, speed, metrics):
        pass

    def close(self):
        pass


ERRORS = [OwnError("mine"), KeyboardInterrupt(), SystemExit(3), OSError(errno.ENOSPC, "No space left")]
PLACES = {
    "a metric": lambda error: {"metrics": {"failing": raising(error)}},
    "a log": lambda error: {"log": Failing("write", error, 2)},
    "a log that is closed": lambda error: {"log": Failing("close", error)},
    "a display": lambda error: {"progress": Failing("update", error, 2)},
    "a display that ends": lambda error: {"progress": Failing("exit", error)},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_in_a_callback_saves_the_run_and_carries_its_result(place, error, tmp_path):
    with pytest.raises(type(error)) as caught:
        run(steps=60, checkpoint=tmp_path, **PLACES[place](error))
    assert caught.value is error
    reached = int(error.result.state.step)
    assert reached >= 40
    assert saved_steps(tmp_path)[-1] == reached
    assert f"reached step {reached}" in "".join(error.__notes__)
    same_bits(run(steps=60), run(steps=60, checkpoint=tmp_path, resume=True))


def test_a_log_to_a_pipe_whose_reader_has_gone_saves_the_run(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    def leave(problem, state):
        if state.step == 40:
            os.close(reader)
        return 0.0

    with pytest.raises(BrokenPipeError) as caught:
        run(steps=60, checkpoint=tmp_path / "run", log=tmp_path / "pipe", metrics={"leave": leave})
    assert saved_steps(tmp_path / "run")[-1] == int(caught.value.result.state.step) == 40


def test_a_log_that_cannot_be_closed_keeps_no_lock(tmp_path):
    with pytest.raises(OwnError):
        run(steps=20, checkpoint=tmp_path, log=[Failing("close", OwnError()), Failing("close", OwnError())])
    run(steps=40, checkpoint=tmp_path, resume=True)


def test_all_logs_are_closed_if_the_first_cannot_be(tmp_path):
    closed = Failing("write", OwnError(), at=10**9)
    closed.close = lambda: closed.__dict__.update(done=True)
    with pytest.raises(OwnError):
        run(steps=20, log=[Failing("close", OwnError()), closed])
    assert closed.done


@pytest.mark.parametrize("stream", [None, "closed", "broken"])
@pytest.mark.parametrize("progress", ["auto", "lines", "bar"])
def test_a_run_goes_on_without_stderr(stream, progress, monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError(errno.EPIPE, "Broken pipe")

        def isatty(self):
            return True

    given = {None: None, "closed": io.StringIO(), "broken": Broken()}[stream]
    if stream == "closed":
        given.close()
    monkeypatch.setattr(sys, "stderr", given)
    if progress == "bar":
        pytest.importorskip("rich")
    assert run(steps=20, progress=progress).outcome is bx.Outcome.FINISHED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_during_the_last_save_is_no_reason_to_end(number, tmp_path, monkeypatch):
    finish, sent = CheckpointStore._finish, []

    def signalled(store):
        if store._pending is not None and store._pending.step == 60 and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        finish(store)

    monkeypatch.setattr(CheckpointStore, "_finish", signalled)
    result = run(steps=60, checkpoint=tmp_path)
    assert sent
    assert result.outcome is bx.Outcome.FINISHED
    assert saved_steps(tmp_path)[-1] == 60


def lose(folder, way):
    if way == "removed":
        shutil.rmtree(folder)
    else:
        folder.rename(folder.with_name("moved"))
    if way == "replaced":
        shutil.copytree(folder.with_name("moved"), folder)


@pytest.mark.parametrize("way", ["removed", "moved", "replaced"])
def test_a_directory_lost_while_a_write_is_pending_is_a_checkpoint_error(way, tmp_path, monkeypatch):
    folder, finish = tmp_path / "run", CheckpointStore._finish

    def lost(store):
        if store._pending is not None and store._pending.step == 40:
            lose(folder, way)
        finish(store)

    monkeypatch.setattr(CheckpointStore, "_finish", lost)
    with pytest.raises(bx.CheckpointError) as caught:
        run(steps=60, checkpoint=folder, save_every=20)
    assert int(caught.value.result.state.step) in (40, 60)
    assert str(folder) in str(caught.value)
    monkeypatch.undo()
    for place in (folder, tmp_path / "moved"):
        if place.exists() and saved_steps(place):
            # If the folder was removed, the last checkpoint may be half written, and no other is left.
            with contextlib.suppress(bx.CheckpointError) if way == "removed" else contextlib.nullcontext():
                resumed = run(steps=60, checkpoint=place, resume=True)
                same_bits(run(steps=60), resumed)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_read_that_fails_for_another_reason_than_damage_changes_nothing(code, tmp_path, monkeypatch):
    run(steps=60, checkpoint=tmp_path, save_every=20)
    before = sorted(tmp_path.rglob("*"))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "read_meta", fail)
        with pytest.raises(bx.CheckpointError, match=r"could not be read .* nothing was changed"):
            run(steps=80, checkpoint=tmp_path, resume=True)
    assert sorted(tmp_path.rglob("*")) == before
    resumed = run(steps=80, checkpoint=tmp_path, resume=True)
    same_bits(run(steps=80), resumed)


@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(resume, tmp_path, monkeypatch):
    run(steps=60, checkpoint=tmp_path, save_every=20)
    before = sorted(tmp_path.rglob("*"))

    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        with pytest.raises(bx.CheckpointError, match=r"cannot use .* Input/output error"):
            run(steps=80, checkpoint=tmp_path, resume=resume)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_device_without_room_for_a_checkpoint_does_not_make_it_damaged(tmp_path, monkeypatch):
    run(steps=40, checkpoint=tmp_path, save_every=20)

    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_arrays, "placed", fail)
        with pytest.raises(bx.CheckpointError, match=r"could not be read .* nothing was changed"):
            run(steps=80, checkpoint=tmp_path, resume=True)
    assert saved_steps(tmp_path) == [20, 40]


def test_a_checkpoint_whose_read_back_fails_keeps_its_name(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_read_arrays", fail)
        with pytest.raises(bx.CheckpointError, match="Input/output error"):
            run(steps=20, checkpoint=tmp_path)
    assert saved_steps(tmp_path) == [20]
    same_bits(run(steps=40), run(steps=40, checkpoint=tmp_path, resume=True))


def test_a_checkpoint_that_does_not_hold_what_was_written_is_set_aside(tmp_path, monkeypatch):
    read = CheckpointStore._read_arrays

    def other(store, step, like):
        found = read(store, step, like)
        return found | {"small": found["small"] ^ 1} if step == 40 else found

    monkeypatch.setattr(CheckpointStore, "_read_arrays", other)
    with pytest.raises(
        bx.CheckpointError, match=r"other arrays than were written.*steps \[20\] are unharmed"
    ):
        run(steps=60, checkpoint=tmp_path, save_every=20)
    assert saved_steps(tmp_path) == [20]
    assert (tmp_path / "damaged_step_40").is_dir()


def test_what_a_person_keeps_in_the_directory_stays(tmp_path):
    for name in ("2022", "step_notes", "step_007", "step_80_old", "step_"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text(name)
    run(steps=200, checkpoint=tmp_path, save_every=20, keep=1)
    damage(tmp_path / "step_200", "truncated")
    with (
        pytest.warns(UserWarning, match="200 is damaged"),
        pytest.raises(bx.CheckpointError, match="all checkpoints"),
    ):
        run(steps=240, checkpoint=tmp_path, resume=True)
    for name in ("2022", "step_notes", "step_007", "step_80_old", "step_"):
        assert (tmp_path / name / "notes.txt").read_text() == name


def test_checkpoints_of_another_run_are_not_deleted(tmp_path):
    """Somebody copied a checkpoint of another run into the directory."""
    run(steps=20, checkpoint=tmp_path / "other", key=jax.random.key(5))
    run(steps=40, checkpoint=tmp_path / "run", save_every=40)
    shutil.copytree(tmp_path / "other" / "step_20", tmp_path / "run" / "step_20")
    run(steps=200, checkpoint=tmp_path / "run", save_every=20, keep=1, resume=True)
    assert saved_steps(tmp_path / "run") == [20, 200]


def test_the_home_folder_is_found_in_the_name_of_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run(steps=20, checkpoint="~/runs/first", log="~/runs/log.jsonl")
    assert saved_steps(tmp_path / "runs" / "first") == [20]
    assert (tmp_path / "runs" / "log.jsonl").is_file()
    assert not (tmp_path / "~").exists()


# --- the lock --------------------------------------------------------------------


def test_the_message_about_a_lock_names_the_process_that_holds_it(tmp_path):
    holder = python(f"""
        import signal, test_checkpoint as t
        measure = lambda problem, state: print("locked", flush=True) or signal.pause()
        t.run(steps=20, checkpoint={str(tmp_path)!r}, metrics={{"wait": measure}})
    """)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(bx.CheckpointError, match=rf"in use by another run, process {holder.pid} "):
            run(steps=20, checkpoint=tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    run(steps=20, checkpoint=tmp_path, resume=True)


def test_a_forked_child_keeps_no_lock(tmp_path):
    """The run ends while the child lives: its copy of the open file must not hold the lock."""
    children = []

    def fork(problem, state):
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.close(done[1])
            os.write(ready[1], b"x")
            os.read(done[0], 1)  # until the parent closes its end
            os._exit(0)
        os.read(ready[0], 1)
        children.append((child, done[1]))
        return 0.0

    try:
        run(steps=20, checkpoint=tmp_path, metrics={"fork": fork})
        run(steps=40, checkpoint=tmp_path, resume=True)
    finally:
        for child, end in children:
            os.close(end)
            os.waitpid(child, 0)
