"""The methods of others in `benchmarks.single_block` do what their papers state; its table."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import single_block
from benchmarks.single_block_peers import Data, Peer, peer_advance, peer_start
from bilevax.experiments.report import Report

ROWS, WIDTH, STEP, UP = 24, 3, 0.05, 0.2
random = np.random.default_rng(3)


def rows():
    return {"row": jnp.asarray(random.normal(size=(ROWS, WIDTH)), jnp.float32),
            "y": jnp.asarray(random.normal(size=ROWS), jnp.float32)}  # fmt: skip


DATA = Data(rows(), rows())


def upper(x, y, batch):
    return jnp.mean((batch["row"] @ y - batch["y"]) ** 2) / 2 + 0.05 * jnp.sum(x * x)


def lower(x, y, batch):
    return jnp.mean((batch["row"] @ y - batch["y"]) ** 2) / 2 + 0.5 * jnp.sum(jnp.exp(x) * y * y)


def peer(name, batch, period=4):
    return Peer(name, upper, lower, optax.sgd(UP), batch, period, by_x=True)


def started(one):
    return peer_start(one, DATA, jnp.zeros(WIDTH), jnp.zeros(WIDTH))


def advanced(one, now, steps):
    return peer_advance(one, DATA, jnp.uint32(0), jnp.float32(STEP), now, steps)


def directions(x, y, v):
    """Those of x, y and v on all rows, in NumPy."""
    (A, b), (C, d) = ((np.asarray(one["row"], float), np.asarray(one["y"], float)) for one in DATA)
    hessian = C.T @ C / ROWS + np.diag(np.exp(x))
    by_y = C.T @ (C @ y - d) / ROWS + np.exp(x) * y
    return 0.1 * x - np.exp(x) * y * v, by_y, hessian @ v - A.T @ (A @ y - b) / ROWS


@pytest.mark.parametrize("name", ["SOBA", "SABA", "SRBA"])
def test_with_one_batch_of_all_rows_a_step_is_that_of_exact_gradients(name):
    one = peer(name, ROWS)
    now = advanced(one, started(one), 5)
    x, y, v = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    for _ in range(5):
        by_x, by_y, by_v = directions(x, y, v)
        x, y, v = x - UP * by_x, y - STEP * by_y, v - STEP * by_v
    for got, expected in zip((now.x, now.y, now.v), (x, y, v), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_amigo_takes_ten_steps_of_y_then_of_v_for_one_of_x():
    one = peer("AmIGO", ROWS)
    now = advanced(one, started(one), 1)
    x, y, v = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    for _ in range(10):
        y = y - STEP * directions(x, y, v)[1]
    for _ in range(10):
        v = v - STEP * directions(x, y, v)[2]
    x = x - UP * directions(x, y, v)[0]
    for got, expected in zip((now.x, now.y, now.v), (x, y, v), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_saba_and_srba_have_no_noise_floor_and_soba_has():
    ends = {}
    for name in ("SOBA", "SABA", "SRBA"):
        one = peer(name, 4)
        now = advanced(one, started(one), 6000)
        ends[name] = max(np.abs(one).max() for one in directions(*map(np.asarray, (now.x, now.y, now.v))))
    assert ends["SABA"] < 1e-5 > ends["SRBA"]
    assert ends["SOBA"] > 1e-2


def test_the_times_of_steps_are_written_as_a_table(tmp_path, monkeypatch):
    took = {"SOBA": {"step": 7.72}, "SRBA": {"step": 14.0, "pass": 2173.8}}
    monkeypatch.setattr(single_block, "CASES", {"a8a": lambda folder: None})
    monkeypatch.setattr(single_block, "speeds", lambda *given: took)
    single_block.main(["a8a", "--speed", "--clock", "wall", "--out", str(tmp_path)])
    first, second = csv.DictReader((tmp_path / "speed.csv").open(encoding="utf-8"))
    assert (first["method"], first["µs of a step"], first["µs of a pass"]) == ("SOBA", "7.7", "")
    assert second["µs of a pass"] == "2173.8"


def test_the_table_has_gaps_of_all_records_in_the_folder(tmp_path):
    def record(values):
        runs = [{"seconds": [0.1, 0.4, 1.1, 2.0], "steps": [1, 2, 3, 40], "passes": [1, 2, 3, 9], "value": v}
                for v in values]  # fmt: skip
        found = {"setting": {"upper_step": 1.0, "lower_step": 0.1, "rarity": 4.0}, "runs": runs}
        return {
            "seconds": 2.0,
            "start": 1.0,
            "least": 0.0,
            "reference": 0.0,
            "methods": {"adam": {"SRBA": found}},
        }

    done = record([[0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.1], [0.5, 0.4, 0.3, 0.15]])
    for name, one in (("a8a", done), ("w8a", record([[0.5]]))):
        (tmp_path / f"single_block_{name}.json").write_text(json.dumps(one))
    single_block.write(Report(tmp_path, {}))
    first, second = csv.DictReader((tmp_path / "single_block.csv").open(encoding="utf-8"))
    assert (first["problem"], first["method"], first["rarity"]) == ("a8a", "SRBA", "4")
    assert [first[name] for name in ("2 s", "least", "largest", "steps/s")] == ["0.15", "0.1", "0.2", "20"]
    assert (second["problem"], second["0.1 s"]) == ("w8a", "diverged")


def test_joined_records_have_all_methods_and_the_least_value():
    parts = [
        {"least": 0.2, "best": [1.0], "methods": {"adam": {"SOBA": "a"}}},
        {"least": 0.1, "best": [2.0], "methods": {"plain": {"SOBA": "b"}, "adam": {"SABA": "c"}}},
    ]
    one = single_block.joined(parts)
    assert one["methods"] == {"plain": {"SOBA": "b"}, "adam": {"SOBA": "a", "SABA": "c"}}
    assert (one["least"], one["best"]) == (0.1, [2.0])
