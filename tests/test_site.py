"""What the documentation site is made of, checked without building it."""

import re
from pathlib import Path

import pytest
import yaml

import bilevax.solvers
from scripts import drawings
from scripts.docs_site import api, gallery, links
from tests.test_docs import anchors, text_of

ROOT = Path(__file__).parent.parent
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
API = text_of(ROOT / "docs" / "api.md")


def pages_of(nav):
    for part in nav:
        for value in part.values() if isinstance(part, dict) else [part]:
            yield from pages_of(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page():
    listed = list(pages_of(CONFIG["nav"]))
    assert len(listed) == len(set(listed))
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    made = {"changelog.md", "contributing.md", "security.md", "gallery/index.md", *api.pages(API)}
    assert set(listed) == written | made


def test_the_reference_lists_every_public_name():
    assert api.problems(API) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("| `Folds` |", "| Folds |", "bilevax.Folds is public, but not in docs/api.md"),
        ("| `Folds` |", "| `Folds`, `Fold` |", "bilevax.Fold is in docs/api.md, but not public"),
        ("| `Folds` |", "| `Folds`, `dot` |", "bilevax.dot is in docs/api.md twice"),
    ],
)
def test_a_name_that_is_missing_strange_or_doubled_is_found(old, new, expected):
    assert api.problems(API.replace(old, new)) == [expected]


def test_a_name_that_two_modules_export_is_documented_once():
    made = "\n".join(api.pages(API).values())
    assert made.count("::: bilevax.Recipe\n") == 1
    assert "::: bilevax.solvers.toolkit.Recipe" not in made
    assert "[`bilevax.Recipe`][bilevax.Recipe]" in made


def test_the_table_of_methods_lists_every_method():
    table = API.split("## Methods")[1].split("What belongs to them")[0]
    listed = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert listed == set(bilevax.solvers.__all__) - {"AbstractSolver", "Recipe"}


def test_names_in_the_tables_lead_to_their_pages():
    text = api.linked(API)
    assert "| [`Folds`](api/problem.md#bilevax.Folds) |" in text
    assert "| [`Tracker`](api/toolkit.md#bilevax.solvers.toolkit.Tracker) |" in text


def test_links_to_pages_stay_on_the_site_and_others_lead_to_the_forge():
    pages = {"docs/paper.md": "paper.md", "SECURITY.md": "security.md", "examples/one.py": "gallery/one.md"}

    def on_the_site(text, source="docs/running.md", place="running.md"):
        return links.for_the_site(text, source, place, pages, lambda path: path == "docs/evidence")

    assert on_the_site("[a](paper.md#x) [b](#y)") == "[a](paper.md#x) [b](#y)"
    assert on_the_site("[a](../SECURITY.md)") == "[a](security.md)"
    assert on_the_site("[a](docs/paper.md)", "CHANGELOG.md", "changelog.md") == "[a](paper.md)"
    assert on_the_site("[a](../examples/one.py)") == "[a](gallery/one.md)"
    assert on_the_site("[a](evidence)") == f"[a]({links.FORGE}/tree/main/docs/evidence)"
    assert on_the_site("[a](../bilevax/theory.py)") == f"[a]({links.FORGE}/blob/main/bilevax/theory.py)"
    for same in ("[a](https://x.org/paper.md)", "`[a](../SECURITY.md)`", "```\n[a](../SECURITY.md)\n```"):
        assert on_the_site(same) == same


def test_links_named_after_a_file_are_named_after_its_title():
    text = "see [paper.md](paper.md#x), [other.md](other.md) and [the paper](paper.md)"
    named = links.with_titles(text, {"paper.md": "The paper"})
    assert named == "see [The paper](paper.md#x), [other.md](other.md) and [the paper](paper.md)"


def test_examples_have_titles_and_the_gallery_its_pictures():
    found = gallery.examples()
    assert all(one.title and one.code for one in found)
    assert gallery.missing(found) == []


def test_a_missing_picture_is_found_once_the_gallery_has_been_drawn(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text('"""A title.\n\nMore.\n"""\n\nprint(1)\n', encoding="utf-8")
    found = gallery.examples(tmp_path)
    assert (found[0].title, found[0].text, found[0].code) == ("A title", "More.", "print(1)")
    monkeypatch.setattr(gallery, "PICTURES", tmp_path / "pictures")
    assert gallery.missing(found) == []
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "other.png").touch()
    absent, stray = gallery.missing(found)
    assert "one.png is missing" in absent
    assert "other.png belongs to no script" in stray


def test_the_drawings_are_those_that_the_script_draws():
    for name, draw in drawings.DRAWINGS.items():
        assert text_of(drawings.FOLDER / f"{name}.svg") == draw().svg()


def test_the_first_questions_are_answered_two_clicks_from_the_first_page():
    first = text_of(ROOT / "docs" / "index.md")
    asked = dict(re.findall(r"^\| \[(.+\?)\]\(faq\.md#(.+)\) \|", first, re.MULTILINE))
    assert len(asked) >= 9
    assert set(asked.values()) <= anchors(ROOT / "docs" / "faq.md")


def test_docstrings_have_no_reST_but_mathematics():
    # What scripts/docs_site/docstrings.py does not translate would stand on the site as it is.
    for path in (ROOT / "bilevax").rglob("*.py"):
        text = text_of(path)
        assert set(re.findall(r"^ *\.\. ([\w-]+)::", text, re.MULTILINE)) <= {"math"}, path
        assert set(re.findall(r":(\w+):`", text)) <= {"math"}, path
