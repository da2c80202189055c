"""The documentation is true: examples run, links and file names exist, lists are complete."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import bilevax as bx
import bilevax.solvers.toolkit as toolkit
from scripts.docs_site import links

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + DOCS
# The examples of these pages need files, and have tests of their own.
ELSEWHERE = {"data.md": "test_data_docs.py", "noisy_labels.md": "test_noisy_label_docs.py"}
LONGEST = 100


def text_of(page):
    return page.read_text(encoding="utf-8")


def examples(page):
    """The Python blocks of a page, with the number of the line before each."""
    text = text_of(page)
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, one.start()) + 1, one[1]) for one in found]


@pytest.mark.parametrize(
    "page", [one for one in DOCS if examples(one) and one.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    doubles = jax.config.jax_enable_x64
    names = {"__name__": "docs"}
    try:
        for line, code in examples(page):
            # Empty lines first, so that an error names the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), names)
    finally:
        jax.config.update("jax_enable_x64", doubles)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_other_pages_have_tests_of_their_own(page, test):
    assert page in (Path(__file__).parent / test).read_text(encoding="utf-8")


def prose(page):
    """The lines of a page outside of tables and code blocks, with their numbers."""
    inside = False
    for number, line in enumerate(text_of(page).split("\n"), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_are_short(page):
    # A link that is a line by itself cannot be broken.
    bare = re.compile(r"\s*([-*] )?<?(\[[^]]*\]\(\S+\)|https?://\S+)[.,:;>]*")
    long = [
        f"{page.name}:{number}: {len(line)}"
        for number, line in prose(page)
        if len(line) > LONGEST and not bare.fullmatch(line)
    ]
    assert long == []


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / "docs" / "evidence").glob("*.md")], ids=lambda page: page.name
)
def test_no_page_holds_two_sides_of_a_merge(page):
    assert re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", text_of(page), re.MULTILINE) == []


def anchors(page):
    """The anchors of a page's headings."""
    titles = [line.lstrip("# ") for _, line in prose(page) if line.startswith("#")]
    return {links.anchor(title) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = page if not name else page.parent / name
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_package_that_a_page_names_exist(page):
    named = re.findall(r"`((?:bilevax|tests|benchmarks|scripts|examples)/[\w/]+\.\w+)`", text_of(page))
    assert [one for one in named if not (ROOT / one).exists()] == []
    # A shorter path, as in `solvers/recipe.py`, is one inside of the package.
    short = re.findall(r"`(\w+/\w+\.py|\w+\.py)`", text_of(page))
    folders = ("bilevax", "tests", "benchmarks", "scripts", "examples")
    known = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [one for one in short if not any(path.endswith(f"/{one}") for path in known)] == []


def hooks(thing):
    return {
        name
        for name, value in inspect.getmembers(thing)
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }


@pytest.mark.parametrize(
    ("title", "thing"),
    [
        ("All hooks of `Recipe`", bx.Recipe),
        ("All hooks of `Tracker`", toolkit.Tracker),
        ("All hooks of `AbstractSolver`", bx.AbstractSolver),
        ("All hooks of `Rows`", bx.Rows),
        ("Another scalar", toolkit.BlockView),
    ],
)
def test_all_hooks_are_listed(title, thing):
    text = text_of(ROOT / "docs" / "own_method.md")
    section = re.split(r"\n#+ ", text.split(f"# {title}\n")[1])[0]
    listed = re.findall(r"`(?:view\.)?(\w+)[(`]", "".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)))
    inherited = {"init", "step"} if thing is bx.Recipe else set()  # those of AbstractSolver
    assert hooks(thing) - inherited <= set(listed)
    assert all(hasattr(thing, name) or name in thing.__annotations__ for name in listed if name != "hook")


def test_the_line_counts_of_own_method_are_those_of_the_files():
    rows = re.findall(
        r"^\| \[(\w+\.py)\]\([^)]*\) \| (\d+) \| (\d+) \| (.*) \|$",
        text_of(ROOT / "docs" / "own_method.md"),
        re.MULTILINE,
    )
    assert [name for name, *_ in rows] == ["ma_soba.py", "f2sa.py"]
    for name, lines, code, imported in rows:
        source = (ROOT / "bilevax" / "solvers" / name).read_text(encoding="utf-8")
        assert int(lines) == source.count("\n")
        assert int(code) == len(code_lines(source))
        modules = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        ours = [node for node in modules if node.module.split(".")[0] == "bilevax"]
        assert [node.module for node in ours] == ["bilevax.solvers.toolkit"]
        assert re.findall(r"`(\w+)`", imported) == [one.name for one in ours[0].names]


def code_lines(source):
    """The lines that are left without docstrings, comments and empty lines."""
    without = re.sub(r'r?""".*?"""', "", source, flags=re.DOTALL)
    return [line for line in without.split("\n") if line.strip() and not line.lstrip().startswith("#")]


def test_the_traced_call_goes_through_files_of_the_package():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, ROOT / "scripts" / "trace_call.py", "--path"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    first, *files = printed.splitlines()
    assert re.fullmatch(r"\d+ files, \d+ switches between files", first)
    assert {"_run/minimize.py", "solvers/recipe.py"} <= {line.split()[-1] for line in files}


def test_the_tree_in_design_shows_every_file_and_no_other():
    text = text_of(ROOT / "docs" / "design.md")
    tree = text.split("## Folders")[1].split("```")[1]
    for folder in ("_util", "_problem", "_step", "solvers", "_run", "_truth"):
        found = re.search(rf"^  {folder}/ .*\n((?:      .*\n)*)", tree, re.MULTILINE)
        assert found is not None, folder
        shown = set(found[1].split())
        there = {path.stem for path in (ROOT / "bilevax" / folder).glob("*.py") if path.stem != "__init__"}
        assert shown == there, folder
