"""Multi-task AUC: the min-max form against closed forms, the rows of tasks, and `bilevax reproduce auc`."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("typer")
from scipy import sparse
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import bilevax as bx
from bilevax.applications.auc import TaskRows, centres, multi_task_auc
from bilevax.cli import app
from bilevax.data import DataError
from bilevax.experiments import auc, auc_tasks

random = np.random.default_rng(0)
ROWS = random.normal(size=(40, 3)).astype(np.float32)
LABELS = np.sign(random.normal(size=(4, 40)) + 0.3)
LABELS[1, :10] = 0


def score(x, task, rows):
    return jax.nn.sigmoid(rows @ x[task])


def test_batches_have_as_many_positives_as_negatives_of_the_right_task():
    source = TaskRows({"row": ROWS, "place": np.arange(40)}, LABELS)
    batch = source.draw(bx.Stream.start(jax.random.key(0)), jnp.array([1, 3]), 500).rows
    assert batch["positive"]["row"].shape == (2, 500, 3)
    for place, task in enumerate((1, 3)):
        for side, sign in (("positive", 1), ("negative", -1)):
            drawn = np.asarray(batch[side]["place"][place])
            np.testing.assert_array_equal(np.unique(drawn), np.flatnonzero(LABELS[task] == sign))
            np.testing.assert_array_equal(batch[side]["row"][place], ROWS[drawn])


@pytest.mark.usefixtures("x64")
def test_the_saddle_is_the_variance_plus_the_squared_shortfall():
    """E₊(h − a)² + E₋(h − b)² + max(margin − (E₊h − E₋h), 0)²: also the mean of (margin − (h₊ − h₋))²."""
    problem, x = multi_task_auc(ROWS, LABELS, score, margin=0.8), random.normal(size=(4, 3))
    for task in range(4):
        scores = np.asarray(score(jnp.asarray(x), task, ROWS), float)
        positive, negative = scores[LABELS[task] > 0], scores[LABELS[task] < 0]
        batch = {"positive": ROWS[LABELS[task] > 0], "negative": ROWS[LABELS[task] < 0]}

        def f(y, task=task, batch=batch):
            return problem.upper(jnp.asarray(x), y, task, batch)

        short = 0.8 - positive.mean() + negative.mean()
        y = {"centres": (positive.mean(), negative.mean()), "dual": jnp.asarray(max(short, 0.0))}
        pairs = np.mean((0.8 - np.subtract.outer(positive, negative)) ** 2)
        assert short > 0
        np.testing.assert_allclose(f(y), pairs, rtol=1e-6)
        for leaf in jax.tree.leaves(jax.grad(f)(y)):
            np.testing.assert_allclose(leaf, 0, atol=1e-6)


def test_a_run_learns_all_tasks_and_its_duals_are_the_shortfalls():
    rows = np.random.default_rng(1).normal(size=(400, 3)).astype(np.float32)
    labels = np.sign(rows @ np.array([[1.0, -1, 0], [0, 1, 1], [1, 1, 1]]).T).T
    problem = multi_task_auc(rows, labels, score)
    result = bx.minimize(problem, jnp.zeros((3, 3)), centres(3), steps=800, batch_size=32, progress=None)
    assert not result.recoveries
    for task in range(3):
        scores = np.asarray(score(result.x, task, rows))
        assert roc_auc_score(labels[task] > 0, scores) > 0.97
        short = 1 - scores[labels[task] > 0].mean() + scores[labels[task] < 0].mean()
        assert result.y["dual"][task] == pytest.approx(short, abs=0.1)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"labels must have the shape \(tasks, rows\) .*, got \(4, 39\)"):
        TaskRows(ROWS, LABELS[:, 1:])
    with pytest.raises(ValueError, match="labels of task 2 must have both classes, got no negative row"):
        TaskRows(ROWS, np.where(np.arange(4)[:, None] == 2, 1, LABELS))
    with pytest.raises(ValueError, match="margin must"):
        multi_task_auc(ROWS, LABELS, score, margin=-1.0)
    with pytest.raises(ValueError, match="has labels of 4 tasks, expected 5"):
        bx.Problem(lambda x, y, block, batch: 0.0, bx.minimum(), 5, TaskRows(ROWS, LABELS))


# --- the experiment --------------------------------------------------------------


def test_the_partial_area_is_that_of_the_hardest_negatives():
    """With n negatives and ρ n whole, the area is the mean over pairs with the ρ n highest negatives."""
    random = np.random.default_rng(0)
    values, positive = random.normal(size=60), np.arange(60) < 20
    hardest = np.sort(values[~positive])[::-1][:10]
    expected = np.mean(values[positive][:, None] > hardest)
    assert auc.partial_area(positive, values, 0.25) == pytest.approx(expected)


def test_without_its_file_mnist_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"BILEVAX_DATA must name the folder of mnist\.npz"):
        auc_tasks.load_digits()


def test_the_command_writes_its_tables(monkeypatch, tmp_path):
    random = np.random.default_rng(0)
    rows, digit = random.random((200, 784)).astype(np.float32), np.arange(200) % 10
    monkeypatch.setattr(auc_tasks, "load_digits", lambda: auc_tasks.Digits(rows, digit, rows, digit))
    X = sparse.csr_matrix((random.random((300, 5)) < 0.5).astype(float))
    y = np.where(np.asarray(X.sum(1)).ravel() + random.normal(size=300) > 3.5, 1, -1)
    known = auc.data.Dataset("w8a", X, y, X, y)
    monkeypatch.setattr(auc.data, "load", lambda name: known)
    small = auc.AUCOptions(
        data=("w8a",),
        seeds=1,
        strengths=(1.0,),
        steps=5,
        tasks=auc_tasks.TaskOptions(images=200, positives=5, batch=2, steps=3, width=4),
    )
    monkeypatch.setattr(auc.AUCOptions, "quick", lambda self: small)
    result = CliRunner().invoke(app, ["reproduce", "auc", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name, count in (("w8a", 6), ("tasks", 6)):
        with (tmp_path / "auc" / f"auc_{name}.csv").open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == count
    result = CliRunner().invoke(app, ["reproduce", "auc", "--part", "all", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "parts must be of 'classifiers' and 'tasks'" in result.output


@pytest.mark.parametrize("name", ["partial_auc", "multi_task_auc"])
def test_an_example_draws_its_picture(name, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--quick"])
    runpy.run_path(str(path), run_name="__main__")
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert "AUC" in capsys.readouterr().out
