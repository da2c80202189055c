"""A report writes tables, plots and the options of the experiment."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")
from bilevax.experiments.kept import Kept
from bilevax.experiments.report import Report, spread


@dataclasses.dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = (0, 1)
    folder: Path = Path("somewhere")


def test_a_table_is_written_as_csv_and_markdown_and_printed(tmp_path, capsys):
    report = Report(tmp_path / "new", Options(), quick=True)
    rows = [{"noise": 0.1, "ours": spread([0.8, 0.9])}, {"noise": 0.2, "paper": np.float64(0.5)}]
    report.table("noise", rows, "Accuracy", "a note")
    with (tmp_path / "new" / "noise.csv").open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert read[0] == {"noise": "0.1", "ours": "0.8500 ± 0.0707", "paper": ""}
    text = (tmp_path / "new" / "noise.md").read_text(encoding="utf-8")
    assert "# Accuracy (quick check)" in text
    assert "| 0.2 |  | 0.5 |" in text
    assert "a note" in text
    assert "0.8500" in capsys.readouterr().out


def test_settings_json_holds_options_facts_and_seconds(tmp_path):
    report = Report(tmp_path, Options())
    report.fact("found", {"upper_step": np.float32(0.5), "seeds": np.arange(2)})
    report.finish()
    facts = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert facts["options"] == {"seeds": [0, 1], "folder": "somewhere"}
    assert facts["found"] == {"upper_step": 0.5, "seeds": [0, 1]}
    assert facts["seconds"] >= 0


def test_a_figure_is_written(tmp_path):
    from matplotlib.figure import Figure

    Report(tmp_path, {}).figure("plot", Figure())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_created_is_an_error_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Report(tmp_path / "file" / "results", {})


def test_missing_results_are_computed_in_several_processes_and_kept(tmp_path):
    path = tmp_path / "kept.json"
    first = Kept(path, {"seeds": 3})
    first.get("four", lambda: 2.0)
    tasks = {"four": functools.partial(math.sqrt, 16), "nine": functools.partial(math.sqrt, 9)}
    tasks["sixteen"] = functools.partial(math.sqrt, 256)
    expected = {"four": 2.0, "nine": 3.0, "sixteen": 16.0}  # the first was there already
    assert first.fill(tasks, processes=2) == expected
    assert Kept(path, {"seeds": 3}, resume=True).results == expected
