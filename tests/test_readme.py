"""The README is true: its examples run as they are, and its tables list every public name and method."""

import re
from pathlib import Path

import pytest

import bilevax as bx
import bilevax.solvers

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_has_examples():
    assert EXAMPLES


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs_as_it_stands(number):
    names = {}
    exec(compile(EXAMPLES[number], f"README.md, example {number}", "exec"), names)
    if "flipped" in names:
        weights, flipped = names["weights"], names["flipped"]
        assert weights[~flipped].mean() > 2 * weights[flipped].mean()


def test_table_of_public_names_is_complete():
    table = README.split("## Public names")[1].split("##")[0]
    listed = set(re.findall(r"`(\w+)`", table))
    assert listed == set(bx.__all__)


def test_table_of_methods_is_complete():
    table = README.split("## Methods")[1].split("##")[0]
    listed = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert listed == set(bilevax.solvers.__all__) - {"AbstractSolver", "Recipe"}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if "://" not in target:
            assert (Path(__file__).parent.parent / target).exists(), target
