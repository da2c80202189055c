"""Figures in the docs are those of the runs that are kept under docs/evidence."""

import json
import re
from decimal import Decimal

import pytest

from scripts import evidence

FOLDERS = sorted(path for path in evidence.FOLDER.iterdir() if path.is_dir())
README = (evidence.FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_marked_table_has_the_figures_of_its_evidence():
    assert [str(problem) for problem in evidence.check(evidence.documents())] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_evidence_is_of_a_full_run_with_its_command_and_is_used(folder):
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["quick"] is False
    row = next(line for line in README.splitlines() if f"]({folder.name})" in line)
    assert re.search(r"`(bilevax|python) ", row)
    texts = [path.read_text(encoding="utf-8") for path in evidence.documents()]
    assert any(f"<!-- evidence: {folder.name}/" in text for text in texts)


def test_evidence_is_small():
    size = sum(path.stat().st_size for path in evidence.FOLDER.rglob("*"))
    assert size < evidence.MOST_BYTES


CSV = 'method,"T",m\n"v1, m/I = 4",579.4 ± 105.1,0.0622\n"v2, m/I = 4",1868 ± 113,3.5e-04\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "evidence" / "one").mkdir(parents=True)
    (tmp_path / "evidence" / "one" / "table.csv").write_text(CSV, encoding="utf-8")
    return tmp_path


def problems(folder, *rows, mark="<!-- evidence: one/table.csv -->"):
    page = folder / "page.md"
    head = ["## Measured", "", "text", "", mark, "", "| method | T |", "| --- | --- |"]
    page.write_text("\n".join([*head, *rows, ""]), encoding="utf-8")
    return evidence.check([page], folder / "evidence")


@pytest.mark.parametrize(
    "row",
    [
        "| BSVRB v1 | 579 ± 105 |",
        "| BSVRB v1 | **.0622** |",
        "| BSVRB v1 | 579 |",  # rounded, without its deviation
        "| 2 | 1,868 ± 113 | 3.5e-4 |",
        "| both | 579 ± 105 | 1,868 ± 113 |",
        "| text | 12 of 13 |",  # no figure
    ],
)
def test_rows_with_the_figures_of_the_file_pass(folder, row):
    assert problems(folder, row) == []


@pytest.mark.parametrize(
    "row",
    [
        "| BSVRB v1 | 579 ± 104 |",
        "| BSVRB v1 | .0623 |",
        "| BSVRB v1 | 1,868 ± 105 |",  # a mean and a deviation of different rows
        "| BSVRB v1 | −.0622 |",
    ],
)
def test_rows_with_other_figures_are_found(folder, row):
    (problem,) = problems(folder, "| v1 | 579 ± 105 |", row)
    assert problem.line == 10
    assert problem.text == row


def test_a_row_has_the_figures_of_at_most_two_rows_of_the_file(folder):
    with (folder / "evidence" / "one" / "table.csv").open("a", encoding="utf-8") as file:
        file.write("v3,7777 ± 1,0.5\n")
    assert problems(folder, "| 579 ± 105 | 7777 ± 1 |") == []
    assert len(problems(folder, "| 579 ± 105 | 1,868 ± 113 | 7777 ± 1 |")) == 1


def test_a_file_that_is_missing_is_found(folder):
    (problem,) = problems(folder, "| v1 | 579 ± 105 |", mark="<!-- evidence: one/other.csv -->")
    assert problem.evidence == "one/other.csv"


def test_a_mark_counts_for_the_next_table_only(folder):
    assert problems(folder, "| v1 | 579 ± 105 |", "", "| another | table |", "| --- | --- |", "| 5.5 |") == []


def test_rows_that_link_to_evidence_are_compared_without_a_mark(folder):
    def linked(figure):
        return problems(folder, f"| start | [one](evidence/one) | {figure}, see there |", mark="no mark")

    assert linked("579 ± 105") == []
    assert len(linked("579 ± 106")) == 1


def test_paragraphs_that_link_to_evidence_are_compared_over_their_lines(folder):
    def said(figure):
        (folder / "page.md").write_text(f"See\n[one](evidence/one):\n{figure} steps.\n\n9 ± 9 else.\n")
        return evidence.check([folder / "page.md"], folder / "evidence")

    assert said("579 ± 105") == []
    assert [problem.line for problem in said("579 ± 106")] == [1]


def test_a_table_of_measurements_has_evidence_or_its_section_is_listed_with_a_command(folder):
    rows = ["| v1 | 579.4 ± 105.1 |", "| v2 | .0622 |", "| v3 | 3.5e-4 |"]
    (problem,) = problems(folder, *rows, mark="no mark")
    assert (problem.line, problem.evidence) == (7, None)
    assert "page.md:7: a table without evidence" in str(problem)
    assert problems(folder, "| v1 | 5 |", "| v2 | 6 |", "| v3 | 7 |", mark="no mark") == []  # sizes, say
    readme = folder / "evidence" / "README.md"
    readme.write_text("| [page.md](../page.md) | Measured | `bilevax reproduce one` | an H200 |\n")
    assert problems(folder, *rows, mark="no mark") == []
    readme.write_text("| [page.md](../page.md) | Measured | by hand | an H200 |\n")
    assert len(problems(folder, *rows, mark="no mark")) == 1


def test_every_section_that_is_listed_as_not_kept_has_such_a_table():
    pages = {path.name: path for path in evidence.documents()}
    known = {
        (name, section) for name, path in pages.items() for _, section, _ in evidence.measured_tables(path)
    }
    assert evidence.not_kept() - known == set()


def test_full_runs_are_kept_and_quick_checks_are_not(folder, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    more = "More.\n\n| page |\n| --- |\n"
    (folder / "evidence" / "README.md").write_text(f"# Evidence\n\n| folder |\n| --- |\n\n{more}")
    for name in ("rows.csv", "curves.png", "kept.json"):
        (results / name).write_text("1\n")
    settings = {"quick": False, "seconds": 120, "device": "1 × cpu"}
    (results / "settings.json").write_text(json.dumps(settings))
    for _ in range(2):  # kept again, it is listed once
        kept = evidence.keep(results, "new", "bilevax reproduce new", folder / "evidence")
    assert {path.name for path in kept} == {"rows.csv", "curves.png", "settings.json"}
    text = (folder / "evidence" / "README.md").read_text(encoding="utf-8")
    assert text.count("[new](new) | `bilevax reproduce new` |") == 1
    assert text.endswith(f"\n\n{more}")
    (results / "settings.json").write_text(json.dumps(settings | {"quick": True}))
    with pytest.raises(ValueError, match="must be of a full run, got a quick check"):
        evidence.keep(results, "new", "bilevax reproduce new", folder / "evidence")


def test_figures_are_read_from_cells_and_texts():
    assert evidence.cell_figures("| 4 | x | +.5 ± .25 | a 7 | 1e-3 |") == [
        (Decimal("4"),),
        (Decimal("0.5"), Decimal("0.25")),
        (Decimal("0.001"),),
    ]
