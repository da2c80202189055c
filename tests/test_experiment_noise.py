"""The noise experiment, on few rows; and its corruptions."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
from scipy import sparse

from bilevax.data import Dataset
from bilevax.experiments import noise, noise_paper
from bilevax.experiments.kept import Kept

pytest.importorskip("cleanlab")
pytest.importorskip("typer")
from typer.testing import CliRunner

from bilevax.cli import app


@pytest.fixture
def data(monkeypatch):
    random = np.random.default_rng(0)
    X = (random.random((1500, 12)) < 0.3).astype(np.float32)
    y = np.where(X @ random.normal(size=12) + 0.5 * random.normal(size=1500) > 0.4, 1, -1)
    found = Dataset("a8a", sparse.csr_matrix(X[:1000]), y[:1000], sparse.csr_matrix(X[1000:]), y[1000:])
    monkeypatch.setattr(noise, "load", lambda name: found)
    monkeypatch.setattr(noise_paper, "load", lambda name: found)
    return found


CONFIG = json.loads(noise.CONFIG.read_text(encoding="utf-8"))


def test_validation_rows_are_clean_and_not_training_rows(data):
    one = noise.corrupt(data, "0.4", 3, CONFIG)
    assert one.wrong.mean() == pytest.approx(0.4, abs=0.01)
    assert len(one.y_clean) == 200
    positives = (data.y == 1).sum()
    true = np.where(one.wrong, -one.y, one.y)
    assert (true == 1).sum() == pytest.approx(0.8 * 0.3 * positives, abs=2)
    assert (one.y_clean == 1).mean() == pytest.approx(positives / 1000, abs=0.01)


def test_noise_0_star_leaves_the_data_unchanged(data):
    one = noise.corrupt(data, "0*", 3, CONFIG)
    assert not one.wrong.any()
    assert len(one.y) == 800


def test_few_clean_rows_have_both_classes(data):
    one = noise.corrupt(data, "0.2", 0, CONFIG, clean=5)
    assert len(one.y_clean) == 5
    assert len(np.unique(one.y_clean)) == 2


def test_a_quick_check_writes_tables_a_plot_and_its_options(data, tmp_path):
    found = noise.run(noise.NoiseOptions(steps=100), tmp_path, quick=True)
    names = {
        "noise.csv",
        "noise.md",
        "noise.png",
        "noise_clean_rows.csv",
        "noise_clean_rows.md",
        "settings.json",
    }
    assert names <= {path.name for path in tmp_path.iterdir()}
    assert [row["noise"] for row in found["paper"]] == ["0.4"]
    assert "0.8051" in (tmp_path / "noise.md").read_text(encoding="utf-8")  # the paper's accuracy
    for row in found["user"]:
        assert row[noise.OURS].shape == (2,)
        assert row["gain"].mean() == pytest.approx((row[noise.OURS] - row[row["best baseline"]]).mean())
        assert all(row[row["best baseline"]].mean() >= row[name].mean() for name in noise.BASELINES)


@pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA names no folder with a8a")
def test_the_splits_of_the_paper_have_one_shape():
    from bilevax.data import load

    data = load("a8a")
    shapes = {noise.corrupt(data, level, seed, CONFIG).X.shape for level in ("0", "0.4") for seed in (0, 1)}
    assert len(shapes) == 1


# --- the paper's protocol -----------------------------------------------------


def test_the_papers_protocol_writes_its_table_and_resumes(data, tmp_path, monkeypatch):
    found = noise_paper.run(noise_paper.PaperNoiseOptions(), tmp_path, quick=True)
    names = {"noise_paper.csv", "noise_paper.md", "noise_paper.png", "settings.json", "kept.json"}
    assert names <= set(os.listdir(tmp_path))
    (row,) = found
    assert all(0.5 < row[name].mean() <= 1 for name in noise_paper.PRINTED)
    chosen = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))["chosen settings"]["0.4"]
    assert chosen["m = 100"]["alpha"] in (0.5, 0.9, 1)

    monkeypatch.setattr(noise_paper, "_bilevel", lambda *given: pytest.fail("nothing is left to run"))
    again = noise_paper.run(noise_paper.PaperNoiseOptions(), tmp_path, quick=True, resume=True)
    np.testing.assert_array_equal(again[0]["m = 1"], row["m = 1"])


def test_the_noise_levels_of_the_papers_protocol_are_chosen_on_the_command_line(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(noise_paper, "run", lambda options, folder, **others: asked.append(options))

    def run(*words):
        return CliRunner().invoke(app, ["reproduce", "noise", *words, "--out", str(tmp_path)])

    levels = ("--noise-level", "0*", "--noise-level", "0.4")
    assert run("--protocol", "paper", *levels).exit_code == 0
    assert asked[0].noises == ("0*", "0.4")
    assert "are for the paper's protocol" in run(*levels).output
    assert "noises must be among" in run("--protocol", "paper", "--noise-level", "0.5").output


def test_levels_may_be_added_to_kept_results(tmp_path, monkeypatch):
    monkeypatch.setattr(noise_paper, "_scores", lambda *given: [0.5, 0.6])
    monkeypatch.setattr(
        noise_paper, "_column", lambda *given: {"settings": {}, "accuracy": [0.7], "moved": [0]}
    )
    few = noise_paper.PaperNoiseOptions(noises=("0.4",))
    assert len(noise_paper.compute(few, tmp_path)) == 4
    monkeypatch.setattr(noise_paper, "_scores", lambda name, noise, *others: {"0": [0.5, 0.6]}[noise])
    more = dataclasses.replace(few, noises=("0", "0.4"))
    assert len(noise_paper.compute(more, tmp_path, resume=True)) == 8


def test_a_model_that_is_not_finite_is_never_chosen():
    rows = {"row": {"dense": np.ones((4, 1), np.float32)}, "label": np.zeros(4, np.int32)}
    found = noise_paper._accuracies(rows, np.array([[np.nan], [-1.0], [1.0]], np.float32))
    np.testing.assert_array_equal(found, [-1, 1, 0])
    validation = np.array([[0.5, np.nan, 0.7, 0.7]])
    score, accuracy = noise_paper._chosen(validation, np.array([[0.1, 0.2, 0.3, 0.4]]))
    assert (score, accuracy) == (0.7, 0.3)


def test_kept_results_belong_to_their_options(tmp_path):
    kept = Kept(tmp_path / "kept.json", {"seeds": 3})
    assert kept.get("a", lambda: np.arange(2)) == [0, 1]
    assert Kept(tmp_path / "kept.json", {"seeds": 3}).get("a", lambda: 1) == 1  # begun anew
    with pytest.raises(ValueError, match=r"resume needs the options .*'seeds': 3.*got {'seeds': 4}"):
        Kept(tmp_path / "kept.json", {"seeds": 4}, resume=True)
