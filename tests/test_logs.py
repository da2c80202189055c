"""Where the history goes while a run goes on, and what a run says it has asked for."""

from __future__ import annotations

import json

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
        run(bx.BSVRBv2(upper_step=1e30), log=kept, steps=10_000)
    assert kept.calls[-1] == ("close",)


def test_a_resumed_run_repeats_no_line(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    file = tmp_path / "log.jsonl"
    run(steps=40, checkpoint=tmp_path / "run", log=file)
    file.write_text(file.read_text() + '{"step": 50}\n{"step": 5')  # killed after the checkpoint
    run(checkpoint=tmp_path / "run", resume=True, log=file)
    assert steps_in(file) == [20, 40, 60]


def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    result = run(log=bx.TensorBoard(tmp_path), metrics={"first": lambda problem, state: state.x[0]})
    (file,) = tmp_path.glob("events*")
    content, seen = file.read_bytes(), {}
    place = 0
    while place < len(content):  # length, its checksum, the record, its checksum
        length = int.from_bytes(content[place : place + 8], "little")
        event = Event.FromString(content[place + 12 : place + 12 + length])
        place += 16 + length
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert [step for step, _ in seen["objective"]] == [20, 40, 60]
    assert [value for _, value in seen["first"]] == pytest.approx(result.history["first"].tolist())


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
