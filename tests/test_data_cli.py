"""`bilevax data`: tables, paths and messages, never a traceback."""

import subprocess
import sys

import pytest

pytest.importorskip("typer", reason="the command line needs typer")
from typer.testing import CliRunner

from bilevax.cli import app
from bilevax.data import registry

ROWS = b"-1 1:1\n+1 2:1\n"


def run(*words):
    return CliRunner().invoke(app, ["data", *words])


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A data folder with a wrong a8a, an unpacked ml-1m, and an empty cache."""
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BILEVAX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "ml-1m").mkdir(parents=True)
    (tmp_path / "data" / "libsvm").mkdir()
    (tmp_path / "data" / "libsvm" / "a8a").write_bytes(ROWS)
    return tmp_path


def test_list_shows_every_set_and_where_it_is(folders):
    result = run("list")
    assert result.exit_code == 0
    for name in registry.ENTRIES:
        assert name in result.stdout
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if "│" in line}
    assert str(folders / "data" / "ml-1m") in lines["ml-1m"]
    assert "incomplete" in lines["a8a"]
    assert "to be downloaded" in lines["w8a"]
    assert "to be obtained by hand" in lines["netflix"]
    assert "198.7 MB" in lines["ml-20m"]


def test_path_prints_what_was_found_and_only_that(folders):
    result = run("path", "ml-1m")
    assert (result.exit_code, result.stdout) == (0, f"{folders / 'data' / 'ml-1m'}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("path", "mars"), "no data set is called 'mars'; known are a8a"),
        (("fetch", "mars"), "no data set is called 'mars'"),
        (("path", "w8a"), "libsvm/w8a is not at"),
        (("path", "a8a"), "a8a: is not the published a8a"),
        (("fetch", "netflix"), "netflix cannot be downloaded; put it at one of"),
    ],
)
def test_errors_are_messages_with_exit_code_1(words, message):
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_fetch_downloads_into_the_cache_and_prints_the_path(folders, monkeypatch):
    asked = []

    def attempt(download, part):
        asked.append(download.url)
        part.write_bytes(b"not what it should be")

    monkeypatch.setattr("bilevax.data.download._Download._attempt", attempt)
    result = run("fetch", "ml-100k")
    assert result.exit_code == 1
    assert "has the md5" in result.stderr
    assert "expected 0e33842e24a9c977be4e0107933c0723" in result.stderr
    assert list((folders / "cache").iterdir()) == []
    entry = registry.Entry("tiny", "two rows", (registry.Source("tiny", "https://example.org/tiny", 100),))
    monkeypatch.setattr(registry, "ENTRIES", {"tiny": entry})
    result = run("fetch", "tiny")
    assert (result.exit_code, result.stdout) == (0, f"{folders / 'cache' / 'tiny'}\n")
    assert asked == [
        "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
        "https://example.org/tiny",
    ]


def test_command_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "bilevax", "data", "path", "mars"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert result.stderr.startswith("bilevax data: no data set is called 'mars'")


def test_missing_packages_are_named(monkeypatch, capsys):
    from bilevax.__main__ import main

    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "bilevax.cli", raising=False)
    monkeypatch.delitem(sys.modules, "bilevax.data.cli", raising=False)
    with pytest.raises(SystemExit, match=r'needs typer: pip install "bilevax\[cli\]"'):
        main()
