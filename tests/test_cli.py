"""The command `bilevax`: a table of contents, an example for every command, one line for every mistake."""

import os
import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("typer", reason="the command line needs typer")
from typer.main import get_command
from typer.testing import CliRunner

from bilevax.cli import app


def run(*words):
    # A wide terminal, so that no line of the help is broken.
    return CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(app, words, prog_name="bilevax")


def commands(group=None, path=()):
    """All commands, as the words that call them."""
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


COMMANDS = list(commands())


def test_help_is_a_table_of_contents():
    text = run("--help").stdout
    places = [
        text.index(part) for part in ("Start here", "demo   ", "The paper and beyond", "reproduce", "Data")
    ]
    assert places == sorted(places)
    text = run("reproduce", "--help").stdout
    for part in ("The paper's experiments", "The paper's theorems", "Beyond the paper"):
        assert part in text


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_has_an_example_that_the_command_understands(words):
    (example,) = re.findall(r"Example: .*?\b(bilevax [^|)\n]*)", run(*words, "--help").stdout)
    name, *given = shlex.split(example)
    assert tuple(given[: len(words)]) == words
    command = get_command(app)
    for word in words:
        command = command.commands[word]
    command.make_context(name, given[len(words) :])  # raises if an option is unknown


MISTAKES = [
    ("dmo",),
    ("data", "path", "mars"),
    ("data", "path"),
    ("demo", "--splits", "0"),
    ("demo", "--out", "/dev/null/demo.png"),
    ("demo", "--out", "."),
    ("reproduce", "hyperopt", "--method", "SGD"),
    ("reproduce", "hyperopt", "--data", "mars"),
    ("reproduce", "ablation", "--method", "SGD"),
    ("reproduce", "noise", "--seeds", "many"),
    ("reproduce", "noise", "--seeds", "-1"),
    ("reproduce", "noise", "--protocol", "theirs"),
    ("reproduce", "noise", "--unknown"),
    ("reproduce", "auc", "--data", "mars"),
    ("reproduce", "auc", "--part", "everything"),
    ("reproduce", "rates", "--method", "SGD"),
    ("reproduce", "rates", "--family", "cubic"),
    ("reproduce", "rates", "--out", "/dev/null/results", "--quick"),
    ("reproduce", "ndcg", "--data", "mars"),
    ("reproduce", "ndcg", "--hyperparameters", "nowhere.json"),
    ("reproduce", "choices", "--question", "why"),
    ("reproduce", "meta", "--family", "cosines"),
    ("reproduce", "grouped", "--data", "nowhere.csv"),
    ("tune",),
    ("tune", "mars"),
    ("tune", "like-ml-1m", "--method", "SGD"),
    ("tune", "a8a", "--grid", "fine"),
]


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_answered_by_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    monkeypatch.setenv("BILEVAX_CACHE", str(tmp_path))
    result = run(*words)
    assert result.exit_code in (1, 2)
    (line,) = result.output.splitlines()
    assert line.startswith("bilevax")


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.delitem(sys.modules, "bilevax.experiments.demo", raising=False)
    result = run("demo")
    assert result.exit_code == 1
    assert result.output == 'bilevax demo: this needs sklearn: pip install "bilevax[experiments]"\n'


def complete(words):
    """What bash is offered for the last word; typer reads the request from the environment."""
    request = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    environment = os.environ | request | {"_BILEVAX_COMPLETE": "complete_bash"}
    asked = [sys.executable, "-m", "bilevax"]
    return subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=120).stdout.split()


def test_the_shell_completes_commands_and_data_sets():
    assert complete("bilevax repr") == ["reproduce"]
    assert complete("bilevax data fetch ml-1") == ["ml-100k", "ml-1m", "ml-10m"]
