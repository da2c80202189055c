"""The noise experiment, on few rows; and its corruptions."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from scipy import sparse

from bilevax.data import Dataset
from bilevax.experiments import noise

pytest.importorskip("cleanlab")


@pytest.fixture
def data(monkeypatch):
    random = np.random.default_rng(0)
    X = (random.random((1500, 12)) < 0.3).astype(np.float32)
    y = np.where(X @ random.normal(size=12) + 0.5 * random.normal(size=1500) > 0.4, 1, -1)
    found = Dataset("a8a", sparse.csr_matrix(X[:1000]), y[:1000], sparse.csr_matrix(X[1000:]), y[1000:])
    monkeypatch.setattr(noise, "load", lambda name: found)
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
