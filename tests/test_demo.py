"""The demo runs from end to end; its accuracies are not tested here."""

import numpy as np
import pytest

for needed in ("sklearn", "matplotlib", "rich"):
    pytest.importorskip(needed, reason="the demo needs the experiments extra")

from bilevax.experiments import demo  # noqa: E402


def test_demo_prints_its_table_and_draws_its_plot(tmp_path, capsys):
    plot = tmp_path / "new" / "demo.png"
    demo.main(["--splits", "2", "--steps", "20", "--out", str(plot)])
    printed = capsys.readouterr().out
    for name in ("BSVRBv1", "BSVRBv2", "all rows", "clean rows", "true labels", "AUROC"):
        assert name in printed
    assert plot.stat().st_size > 10_000


def test_splits_of_the_digits_are_disjoint_and_repeatable():
    split, again = demo.load_split(3), demo.load_split(3)
    for one, other in zip(split[:3], again[:3], strict=True):
        np.testing.assert_array_equal(one.row, other.row)
    rows = [{row.tobytes() for row in part.row} for part in split[:3]]
    assert len(set.union(*rows)) == sum(len(part.row) for part in split[:3])
    assert len(split.clean.label) == demo.CLEAN_ROWS
    assert 0.35 < split.flipped.mean() < 0.45
