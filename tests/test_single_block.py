"""The methods of others in `benchmarks.single_block` do what their papers state; its table."""

import csv
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import single_block, single_block_cases
from benchmarks.single_block_peers import Data, Peer, peer_advance, peer_start
from benchmarks.single_block_runs import MARKS, Run

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


def test_the_lower_problem_of_the_cleaning_case_is_solved_in_few_iterations(monkeypatch):
    size, minimize = (400, 30), single_block_cases.minimize
    rows = (random.random(size) * np.geomspace(1, 1e-2, 30)).astype(np.float32)
    labels = random.integers(0, 10, size[0])
    found = []

    def watched(*given, **more):
        found.append(minimize(*given, **more))
        return found[0]

    monkeypatch.setattr(single_block_cases, "minimize", watched)
    case = single_block_cases.Weighted(rows, labels, rows, labels)
    x = random.normal(size=size[0])
    y = case.solve(x, np.zeros((30, 10)), 1e-6)
    chances = np.exp(rows @ y)
    chances /= chances.sum(1, keepdims=True)
    weight = 1 / (1 + np.exp(-x[:, None])) / size[0]
    slope = rows.T @ (weight * (chances - np.eye(10)[labels])) + single_block_cases.RIDGE * y
    assert np.abs(slope).max() < 1e-6
    assert found[0].nit <= 12


def test_the_times_of_steps_are_written_as_a_table(tmp_path, monkeypatch):
    took = {"SOBA": {"step": 7.72}, "SRBA": {"step": 14.0, "pass": 2173.8}}
    monkeypatch.setattr(single_block, "case_of", lambda name: None)
    monkeypatch.setattr(single_block, "speeds", lambda *given: took)
    single_block.main(["a8a", "--speed", "--clock", "wall", "--out", str(tmp_path)])
    first, second = csv.DictReader((tmp_path / "speed.csv").open(encoding="utf-8"))
    assert (first["method"], first["µs of a step"], first["µs of a pass"]) == ("SOBA", "7.7", "")
    assert second["µs of a pass"] == "2173.8"


def made_up(setting, seed):
    """The values of h of a run on `made_up_case`: the better, the nearer η is to 2; the seed is noise."""
    h = abs(setting["upper_step"] - 2) + 0.1 * setting["lower_step"] + 0.01 * (seed % 3)
    return [h + 0.3, h + 0.2, h + 0.1, h]


def made_up_run(case, method, setting, seconds, seed, clock):
    if setting["upper_step"] > 3:  # diverges
        return Run([0.1], [1], [1.0], [1.0], [0.0])
    times = [mark * seconds for mark in MARKS]
    return Run(times, [1, 2, 3, 40], [1.0, 2.0, 3.0, 9.0], made_up(setting, seed), [0.0] * 4)


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Runs the command on a made-up problem; returns the rows of its table, and how many runs it made."""
    count = [0]

    def counted(*given):
        count[0] += 1
        return made_up_run(*given)

    def least(start, *limits):
        return 0.05 * float(np.ravel(start)[0])

    def case_of(name):
        return SimpleNamespace(
            x0=10.0, y0=0.0, value=lambda x, y: float(x), least=least,
            starts=[1.0, 4.0], upper_steps=(1.0, 2.0, 9.0), adam_steps=(2.0,), lower_steps=(0.5, 1.0),
        )  # fmt: skip

    monkeypatch.setattr(single_block, "run", counted)
    monkeypatch.setattr(single_block, "case_of", case_of)
    monkeypatch.setattr(single_block, "skipped", lambda method, case: None)

    def main(*words):
        count[0] = 0
        single_block.main([*words, "--clock", "wall", "--seconds", "2", "--out", str(tmp_path)])
        with (tmp_path / "single_block.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file)), count[0]

    return main


def test_the_search_chooses_steps_and_rarity_and_leaves_out_what_diverges(compared):
    rows, _ = compared("a8a", "--methods", "SOBA", "SRBA", "--kinds", "plain", "--seeds", "3")
    assert [(row["method"], row["η"], row["τ"]) for row in rows] == [
        ("SOBA", "2", "0.5"),
        ("SRBA", "2", "0.5"),
    ]
    assert [row["rarity"] for row in rows] == ["", "1"]
    # h ends at .05, .06 and .07; L-BFGS ends at .05 from its first start, at the best x at 0.05 · .05.
    assert [rows[0][name] for name in ("2 s", "least", "largest", "steps/s")] == [
        f"{(0.06 - 0.0025) / (10 - 0.0025):.2g}",
        f"{(0.05 - 0.0025) / (10 - 0.0025):.2g}",
        f"{(0.07 - 0.0025) / (10 - 0.0025):.2g}",
        "20",
    ]


def test_a_resumed_comparison_runs_only_what_is_missing(compared):
    words = ("a8a", "--kinds", "plain", "--seeds", "2")
    _, first = compared(*words, "--methods", "SOBA")
    rows, second = compared(*words, "--methods", "SOBA", "SABA", "--resume")
    # Six points, three finalists on two seeds, two reported runs.
    assert (first, second) == (6 + 3 * 2 + 2, first)
    assert [row["method"] for row in rows] == ["SOBA", "SABA"]


def test_a_method_that_always_diverges_says_so(compared, monkeypatch):
    monkeypatch.setattr(single_block, "run", lambda *given: Run([], [], [], [], []))
    rows, _ = compared("a8a", "--kinds", "adam", "--methods", "SOBA", "--seeds", "2", "--evaluations", "0")
    assert rows[0]["0.1 s"] == "diverged"
