"""The suite of benchmarks: its hour, and what it calls slower."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from benchmarks import against, peers, suite
from scripts import evidence


def test_all_parts_together_have_an_hour():
    assert sum(part.minutes * part.rounds for part in suite.PARTS.values()) <= 60


def test_only_what_exceeds_the_noise_of_both_records_is_slower():
    old = {"same": [10.0, 10.2], "slow": [10.0, 10.1], "noisy": [10.0, 14.0], "gone": [1.0]}
    new = {"same": [10.3, 10.4], "slow": [11.5, 11.6], "noisy": [13.0, 13.1], "fresh": [9.0]}
    assert [line.split(":")[0] for line in suite.slower(new, old)] == ["slow"]
    assert suite.slower(old, old) == []


def test_times_are_the_microseconds_in_the_files_of_all_rounds():
    def files(value):
        return {"step": {"a8a": {"kernel": {"microseconds": value, "compile_seconds": 3.0}}}, "rows": [1, 2]}

    assert suite.rounds_of([files(2.0), files(2.5)]) == {"a8a kernel": [2.0, 2.5]}
    assert suite.rounds_of([]) == {}
    assert suite.rounds_of([files(2.0)]) == {}  # its noise is not known


def test_paths_of_the_caller_are_kept(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert suite._environment()["PYTHONPATH"] == f"{suite.ROOT}{os.pathsep}/somewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert suite._environment()["PYTHONPATH"] == str(suite.ROOT)


@pytest.mark.parametrize("installed", [True, False])
def test_peers_that_are_not_installed_are_left_out_and_named(installed, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    found = peers.fastest_installed()
    assert set(found) == (set(peers.FAST) if installed else set(peers.FAST) - set(peers.TORCH_PEERS))
    assert ("torch and torchopt" in capsys.readouterr().out) != installed


def test_a_part_that_fails_or_takes_too_long_is_named(tmp_path):
    assert suite.run(suite.Part(("benchmarks.no_such_part",), 1.0), tmp_path) == ([], "", "ended with 1")
    late = suite.Part(("benchmarks.step",), 0.001)
    assert suite.run(late, tmp_path)[2] == "took more than 0.001 minutes"


def test_what_a_part_writes_can_be_kept_as_evidence(tmp_path):
    folder = tmp_path / "growth"
    folder.mkdir()
    (folder / "old.csv").write_text("1\n")
    small = ("--sizes", "d_x", "--most", "100", "--turns", "1", "--seconds", "0.01")
    (files,), text, wrong = suite.run(suite.Part(("benchmarks.growth", *small), 2.0), folder)
    assert (wrong, "| size | value |" in text) == ("", True)
    assert suite.times(files["growth"])
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "README.md").write_text("| folder |\n| --- |\n", encoding="utf-8")
    kept = evidence.keep(folder, "growth", "make bench BENCH=growth", tmp_path / "evidence")
    names = {"growth.csv", "growth.md", "growth.png", "growth.pdf", "captions.md", "settings.json"}
    assert {path.name for path in kept} == names


@pytest.mark.parametrize(("times", "status"), [([10.0], 0), ([20.0], 1)])
def test_two_records_are_compared(times, status, tmp_path):
    for name, values in (("new", times), ("old", [10.0])):
        record = {"commit": name, "machine": "m", "seconds": 0, "times": {"step: a8a": values}}
        (tmp_path / name).write_text(json.dumps(record))
    given = [sys.executable, "-m", "benchmarks.suite", "--compare", tmp_path / "new", tmp_path / "old"]
    done = subprocess.run(given, cwd=suite.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert f"new beside old: {status} of 1 are slower" in done.stdout


def test_the_latest_record_of_the_same_machine_counts(tmp_path):
    for name, machine, seconds in (("a", "m", 1), ("b", "m", 2), ("c", "other", 3), ("d", "m", 4)):
        record = {"commit": name, "machine": machine, "seconds": seconds}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert suite.latest(tmp_path, {"commit": "d", "machine": "m"}) == tmp_path / "b.json"
    assert suite.latest(tmp_path / "nothing", {"commit": "d", "machine": "m"}) is None


def test_tables_that_are_joined_say_how_long_their_runs_took(tmp_path, monkeypatch):
    files = []
    for number, method in enumerate(["SOBA", "MMBO"], 1):
        folder = tmp_path / method
        folder.mkdir()
        files.append(folder / "against.csv")
        files[-1].write_text(f"method,µs per step\n{method},10\n", encoding="utf-8")
        settings = {"options": {"methods": method}, "seconds": 100.5 * number}
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    together = tmp_path / "both"
    monkeypatch.setattr("sys.argv", ["against", "--join", *map(str, files), "--out", str(together)])
    against.main()
    settings = json.loads((together / "settings.json").read_text(encoding="utf-8"))
    assert settings["seconds"] == 301.5
    assert [run["methods"] for run in settings["runs"]] == ["SOBA", "MMBO"]
    assert "MMBO,10\nSOBA,10" in (together / "against.csv").read_text(encoding="utf-8").replace("\r", "")
