"""Real signals: a script that is interrupted ends, says so, and saves no unfinished model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from bilevax.experiments import validation

TESTS = os.path.dirname(__file__)


def python(program):
    """Runs a Python program that can import the tests; returns it when it has ended."""
    source = f"import sys; sys.path.insert(0, {TESTS!r})\n" + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)


LOOP = """
    import os
    import bilevax as bx
    from test_checkpoint import run

    def send(problem, state):
        os.kill(os.getpid(), {number})
        return 0.0

    for attempt in range(3):
        result = run(steps=10**6, every=20, metrics={{"send": send}}, **{options})
        print(attempt, result.outcome, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_raises_ends_a_loop_of_runs(number):
    options = '{"stop": bx.Stop(raise_on_interrupt=True)}'
    ended = python(LOOP.format(number=int(number), options=options))
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert f"KeyboardInterrupt: bilevax.minimize was interrupted by {number.name} at step 20" in ended.stderr


def test_an_interrupt_that_returns_prints_one_line_for_each_run():
    ended = python(LOOP.format(number=int(signal.SIGINT), options="{}"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"{attempt} interrupted" for attempt in range(3)]
    lines = [line for line in ended.stderr.splitlines() if "was interrupted by SIGINT at step 20" in line]
    assert len(lines) == 3


FIT_AND_SAVE = """
    import os, signal
    from bilevax.applications.ranking import TopKRecommender
    from bilevax.data import generate

    class Impatient:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, step, speed, metrics):
            os.kill(os.getpid(), signal.SIGINT)

    small = {{"users_per_step": 10, "negatives": 10, "cutoff": 20}}
    table = generate.interactions(30, 40, 600, seed=0).table
    recommender = TopKRecommender("song", width=2, epochs=500, warm_up=0, every=1, settings=small)
    recommender.fit(table, progress=Impatient(), **{options})
    recommender.save({path!r})
"""


def test_a_script_that_fits_and_saves_saves_no_unfinished_model(tmp_path):
    path = tmp_path / "model.npz"
    ended = python(FIT_AND_SAVE.format(path=str(path), options="{}"))
    assert ended.returncode != 0
    assert "KeyboardInterrupt: TopKRecommender.fit was interrupted" in ended.stderr
    assert not path.exists()


def test_a_script_can_choose_to_save_the_unfinished_model(tmp_path):
    path = tmp_path / "model.npz"
    ended = python(FIT_AND_SAVE.format(path=str(path), options='{"raise_on_interrupt": False}'))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("was interrupted") == 1
    assert path.exists()


@pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA is not set")
def test_an_interrupted_command_exits_with_130_and_writes_no_table(monkeypatch, tmp_path):
    from bilevax.cli import app

    def send(problem, state):  # traced in the first run, so that the signal comes within it
        os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    monkeypatch.setattr(validation, "validation_loss", send)
    ended = CliRunner().invoke(app, ["reproduce", "hyperopt", "--quick", "--out", str(tmp_path)])
    assert ended.exit_code == 130
    assert ended.stderr.splitlines()[-1] == "bilevax: interrupted before it was finished"
    assert not list(tmp_path.rglob("hyperopt.csv"))
