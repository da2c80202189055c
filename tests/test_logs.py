"""Where the history goes while a run goes on, and what a run says it has asked for."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys

import jax
import pytest
from calls import grouped
from closed_forms import LinearMean, Quadratic

import bilevax as bx

CASE = Quadratic(m=6, rows=7, d_y=3, d_x=3)
SOLVER = bx.BSVRBv2(upper_step=0.1)


def run(solver=SOLVER, case=CASE, **arguments):
    given = {"steps": 60, "every": 20, "key": jax.random.key(0), "progress": None, "blocks_per_step": 2}
    return bx.minimize(
        case.problem, case.x0, case.y0, solver=solver, **grouped(**(given | {"batch_size": 3} | arguments))
    )


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Kept:
    """A log of one's own."""

    def __init__(self):
        self.calls = []

    def start(self, entries):
        self.calls.append(("start", [entry["step"] for entry in entries]))

    def write(self, entry):
        self.calls.append(("write", entry["step"]))

    def close(self):
        self.calls.append(("close",))


def test_entries_go_to_every_log_and_all_are_closed(tmp_path):
    kept = Kept()
    run(log=[tmp_path / "log.jsonl", kept])
    assert kept.calls == [("start", []), ("write", 20), ("write", 40), ("write", 60), ("close",)]
    assert steps_in(tmp_path / "log.jsonl") == [20, 40, 60]


def test_logs_are_closed_when_a_run_fails():
    kept = Kept()
    with pytest.raises(bx.DivergedError):
        run(bx.BSVRBv2(upper_step=1e30), log=kept, steps=10_000, recover=False)
    assert kept.calls[-1] == ("close",)


def test_a_resumed_run_repeats_no_line(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    file = tmp_path / "log.jsonl"
    run(steps=40, checkpoint=tmp_path / "run", log=file)
    file.write_text(file.read_text() + '{"step": 50}\n{"step": 5')  # killed after the checkpoint
    run(checkpoint=tmp_path / "run", resume=True, log=file)
    assert steps_in(file) == [20, 40, 60]


def board(folder):
    """{metric: [(step, value)]} as TensorBoard shows them: a session that starts hides later steps."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    seen = {}
    for file in sorted(folder.glob("events*"), key=lambda file: file.stat().st_mtime_ns):
        content, place = file.read_bytes(), 0
        while place < len(content):  # length, its checksum, the record, its checksum
            length = int.from_bytes(content[place : place + 8], "little")
            event = Event.FromString(content[place + 12 : place + 12 + length])
            place += 16 + length
            if event.session_log.status == SessionLog.START:
                seen = {tag: [one for one in points if one[0] < event.step] for tag, points in seen.items()}
            for value in event.summary.value:
                seen.setdefault(value.tag, []).append((event.step, value.simple_value))
    return seen


def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboardX")
    result = run(log=bx.TensorBoard(tmp_path), metrics={"first": lambda problem, state: state.x[0]})
    seen = board(tmp_path)
    assert [step for step, _ in seen["objective"]] == [20, 40, 60]
    assert [value for _, value in seen["first"]] == pytest.approx(result.history["first"].tolist())


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import bilevax as bx, test_logs as t

def kill(problem, state):
    if state.step == 400:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0

options = {{"steps": 1000, "every": 10, "checkpoint": {folder!r} + "/run", "save_every": 100}}
logs = [bx.TensorBoard({folder!r} + "/board"), {folder!r} + "/log.jsonl"]
t.run(log=logs, metrics={{"kill": kill}}, **options)
"""


def test_a_killed_run_has_logged_every_entry_and_a_resumed_one_completes_the_logs(tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("orbax.checkpoint")
    program = KILLED.format(tests=os.path.dirname(__file__), folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    written = list(range(10, 400, 10))
    assert [step for step, _ in board(tmp_path / "board")["objective"]] == written
    assert steps_in(tmp_path / "log.jsonl") == written
    result = run(
        steps=1000,
        every=10,
        checkpoint=tmp_path / "run",
        resume=True,
        log=[bx.TensorBoard(tmp_path / "board"), tmp_path / "log.jsonl"],
        metrics={"kill": lambda problem, state: 0.0},
    )
    points = dict(board(tmp_path / "board")["objective"])
    assert list(points) == steps_in(tmp_path / "log.jsonl") == list(range(10, 1001, 10))
    assert list(points.values()) == pytest.approx(result.history["objective"].tolist())


@pytest.mark.parametrize("kind", ["json lines", "tensorboard"])
def test_a_log_on_a_full_disk_is_an_error_that_carries_the_run(kind, tmp_path):
    """Files may not grow beyond a few bytes: it must neither hang nor keep the lock."""
    pytest.importorskip("orbax.checkpoint")
    if kind == "tensorboard":
        pytest.importorskip("tensorboardX")
    log = bx.TensorBoard(tmp_path / "board") if kind == "tensorboard" else tmp_path / "log.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(problem, state):
        if state.step == 40:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        return 0.0

    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(log=log, metrics={"fill": fill})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.result.state.step == 40


def test_a_log_follows_a_symbolic_link_and_keeps_it(tmp_path):
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "log.jsonl"
    target.write_text("old\n")
    target.chmod(0o640)
    link = tmp_path / "log.jsonl"
    link.symlink_to(target)
    run(log=link)
    assert link.is_symlink()
    assert steps_in(target) == [20, 40, 60]
    assert target.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["log.jsonl"]


def test_a_log_writes_to_a_pipe_and_keeps_it(tmp_path):
    pipe = tmp_path / "log.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run(log=pipe)
        lines = os.read(reader, 100_000).decode().splitlines()
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [json.loads(line)["step"] for line in lines] == [20, 40, 60]


def test_a_log_to_a_pipe_that_nobody_reads_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="cannot be written"):
        run(log=tmp_path / "pipe")


def test_a_log_to_a_device_leaves_the_device():
    """A terminal of the test's own: no other device may suffer if this fails."""
    reader, writer = os.openpty()
    try:
        path = os.ttyname(writer)
        run(log=path)
        assert stat.S_ISCHR(os.stat(path).st_mode)
        assert [json.loads(line)["step"] for line in os.read(reader, 100_000).splitlines()][:1] == [20]
    finally:
        os.close(reader)
        os.close(writer)


def test_a_log_touches_no_other_file(tmp_path):
    for name in ("log.jsonl.new", "log.jsonl.tmp", ".log.jsonl"):
        (tmp_path / name).write_text("mine")
    run(log=tmp_path / "log.jsonl")
    for name in ("log.jsonl.new", "log.jsonl.tmp", ".log.jsonl"):
        assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("log", [3, [3], bx.TensorBoard, object()])
def test_what_is_no_log_is_refused(log):
    with pytest.raises(TypeError, match="log must be a path"):
        run(log=log)


# Per visit at one point: ∇_x f, ∇_y f, ∇_y g and the products or matrices of the method. A first pass over 6
# blocks at one point with 3 rows, then 60 steps of 2 blocks.
@pytest.mark.parametrize(
    ("solver", "case", "gradients", "products", "matrices"),
    [
        (bx.BSVRBv2(upper_step=0.1), CASE, 3 * (6 + 240), 2 * (6 + 240), 0),
        (bx.BSVRBv1(upper_step=0.1), CASE, 3 * (6 + 240), 6 + 240, 6 + 240),
        (bx.KSONG(upper_step=0.1), CASE, 3 * (6 + 120), 6 + 120, 6 + 120),
        (bx.MMBO(upper_step=0.01), CASE, 3 * (6 + 120), 2 * (6 + 120), 0),
        (bx.RSVRB(upper_step=0.1), CASE, 3 * (6 + 240), 0, 2 * (6 + 240)),
        (bx.MSVR(upper_step=0.1), LinearMean(m=6, rows=7, d_y=3, d_x=3), 3 * (6 + 240), 6 + 240, 0),
        (bx.Restart(bx.BSVRBv2(upper_step=0.1), first=30, stages=2), CASE, 3 * 246, 2 * 246, 0),
    ],
)
def test_oracle_calls_are_counted(solver, case, gradients, products, matrices):
    found = run(solver, case).oracles
    rows = 2 * 3 * (6 + 120)
    assert found == bx.Oracles(gradients, products, matrices, rows)


# 6 blocks of 7 upper and 7 lower rows, in groups of 3, 3 and 1; two points of 2 blocks in 60 steps.
@pytest.mark.parametrize(
    ("solver", "gradients", "products", "rows"),
    [
        (
            bx.BlockPAGE(upper_step=0.1, refresh_chance=1.0),
            3 * (6 + 240 + 60 * 6), 2 * (6 + 240 + 60 * 6), 6 * 14 + 6 * 120 + 60 * 6 * 14,
        ),
        (bx.BlockSAGA(upper_step=0.05), 3 * (6 + 18 + 120), 2 * (6 + 18 + 120), 2 * 6 * 14 + 120 * 14 // 3),
    ],
)  # fmt: skip
def test_oracle_calls_of_finite_sums_are_counted(solver, gradients, products, rows):
    assert run(solver).oracles == bx.Oracles(gradients, products, 0, rows)


def test_rows_are_counted_for_whole_blocks_and_without_a_first_pass():
    found = run(batch_size=None, blocks_per_step=None, initial_batch_size=0, steps=10).oracles
    assert found.rows == 10 * 6 * (7 + 7)
    assert found.gradients == 10 * 6 * 6


def test_the_counts_of_a_resumed_run_are_those_of_the_whole(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    run(steps=40, checkpoint=tmp_path)
    assert run(checkpoint=tmp_path, resume=True).oracles == run().oracles


def test_the_history_of_no_steps_is_empty():
    assert run(steps=0).history["objective"].tolist() == []
