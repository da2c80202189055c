"""Figures in the docs are those of the runs that are kept under docs/evidence."""

import json
import re
from decimal import Decimal

import pytest

from scripts import evidence

FOLDERS = sorted(path for path in evidence.FOLDER.iterdir() if path.is_dir())
README = (evidence.FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_figure_of_the_docs_is_that_of_its_evidence():
    assert [str(problem) for problem in evidence.check(evidence.documents())] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_evidence_is_of_a_full_run_with_its_command_and_is_used(folder):
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["quick"] is False
    (row,) = [line for line in README.splitlines() if f"]({folder.name})" in line]
    assert re.search(r"`(bilevax|python) ", row)
    texts = [path.read_text(encoding="utf-8") for path in evidence.documents()]
    assert any(f"evidence/{folder.name})" in text or f"evidence: {folder.name}/" in text for text in texts)


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
        "| BSVRB v1 | none: .0623 |",  # within words
    ],
)
def test_rows_with_other_figures_are_found(folder, row):
    (problem,) = problems(folder, "| v1 | 579 ± 105 |", row)
    assert problem.line == 10
    assert problem.text in row


def test_a_row_has_the_figures_of_at_most_two_rows_of_the_file(folder):
    with (folder / "evidence" / "one" / "table.csv").open("a", encoding="utf-8") as file:
        file.write("v3,7777 ± 1,0.5\n")
    assert problems(folder, "| 579 ± 105 | 7777 ± 1 |") == []
    assert len(problems(folder, "| 579 ± 105 | 1,868 ± 113 | 7777 ± 1 |")) == 1


def test_a_file_that_is_missing_is_found(folder):
    (problem,) = problems(folder, "| v1 | 579 ± 105 |", mark="<!-- evidence: one/other.csv -->")
    assert problem.evidence == "one/other.csv"


def test_a_mark_counts_for_the_next_table_only(folder):
    rows = ["| v1 | 579 ± 105 |", "", "| another | table |", "| --- | --- |"]
    assert problems(folder, *rows, "| 12 steps of 0.0622 |") == []  # its section's evidence has it
    assert [problem.text for problem in problems(folder, *rows, "| 12 steps of 0.0623 |")] == ["0.0623"]


def test_rows_that_link_to_evidence_are_compared_without_a_mark(folder):
    def linked(figure):
        return problems(folder, f"| start | [one](evidence/one) | {figure}, see there |", mark="no mark")

    assert linked("579 ± 105") == []
    assert len(linked("579 ± 106")) == 1


def test_whole_numbers_that_are_cells_are_compared_in_tables_without_a_mark(folder):
    def row(cells):
        return [found.text for found in problems(folder, f"| {cells} |", mark="[one](evidence/one)")]

    assert row("v1 | 579") == row("blocks | 9") == row("12 steps | `12`") == []
    assert row("v1 | 580") == ["580"]
    assert row("v1 | 1,869") == ["1869"]


def said(folder, text, settings=None):
    """What is wrong with a page that says so."""
    if settings:
        (folder / "evidence" / "one" / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "page.md").write_text(text, encoding="utf-8")
    return [(found.line, found.text) for found in evidence.check([folder / "page.md"], folder / "evidence")]


def test_paragraphs_that_link_to_evidence_are_compared_over_their_lines(folder):
    page = "See\n[one](evidence/one):\n{} steps, .0622.\n"
    assert said(folder, page.format("579 ± 105")) == []
    assert said(folder, page.format("579 ± 106")) == [(1, "579 ± 106")]
    assert said(folder, page.format("579 ± 105").replace(".0622", ".0623")) == [(1, ".0623")]


def test_other_paragraphs_are_compared_with_the_evidence_of_their_section(folder):
    page = "# Speed\n\n[one](evidence/one)\n\n- a\n- {} for all\n\n# More\n\n{}\n"
    assert said(folder, page.format("0.0622", "5 of 6")) == []
    assert said(folder, page.format("0.0632", "5 of 6")) == [(5, "0.0632")]
    assert said(folder, page.format("0.0622", "0.0622")) == [(10, "0.0622")]  # no evidence there


def test_figures_of_settings_are_known_and_figures_within_code_are_not_compared(folder):
    code = "`tau=0.77` [a 0.88](b0.99.md) <!-- 0.66 -->\n\n    x = 0.5\n\n```python\n# 0.4\nx = 0.3\n```\n"
    page = f"[one](evidence/one) 0.125\n\n{code}"
    assert said(folder, page) == [(1, "0.125"), (3, "0.88")]
    assert said(folder, page, {"chance": 0.125, "quick": False}) == [(3, "0.88")]


def test_a_whole_number_is_no_evidence_for_digits_behind_the_point(folder):
    assert said(folder, "[one](evidence/one) 1868.0\n") == [(1, "1868.0")]


def test_a_curve_is_no_evidence_for_a_text(folder):
    rows = "".join(f"{number},{number / 1000}\n" for number in range(1, 250))
    (folder / "evidence" / "one" / "curve.csv").write_text(f"step,loss\n{rows}", encoding="utf-8")
    assert said(folder, "[one](evidence/one) .123\n") == [(1, ".123")]


def test_what_is_no_measurement_is_given_with_a_reason(folder):
    assert said(folder, "A goal of 1.3.\n\n<!-- given: 1.3; a goal -->\n") == []
    assert said(folder, "A goal of 1.3.\n\n<!-- given: 1.2; a goal -->\n") == [(1, "1.3")]
    assert said(folder, "A goal of 1.3.\n\n<!-- given: 1.3 -->\n") == [(1, "1.3")]
    assert said(folder, "# A\n\n<!-- given: 1.3; a goal -->\n\n# B\n\n1.3\n") == [(7, "1.3")]


def test_derived_figures_are_computed_from_those_of_the_evidence(folder):
    page = "[one](evidence/one)\n\n<!-- derived: {} -->\n\nThat is {} times.\n"
    assert said(folder, page.format("3.22 = 1868 / 579.4", "3.22")) == []
    assert said(folder, page.format("3.22 = 1868 / 579.4", "3.23")) == [(5, "3.23")]
    assert said(folder, page.format("3.23 = 1868 / 579.4", "3.23")) == [(1, "3.23 = 1868 / 579.4")]
    assert said(folder, page.format("3.21 = 1868 / 581.4", "3.21")) == [(1, "3.21 = 1868 / 581.4")]
    assert said(folder, page.format("-1.69 = log(1868 / 579.4) / log(1 / 2)", "−1.69")) == []
    with pytest.raises(ValueError, match=r"an equation has figures, .*got open\(0.0622\)"):
        said(folder, page.format("1.5 = open(0.0622)", "1.5"))


@pytest.mark.parametrize("by", [4, 5, 6])
def test_a_figure_of_the_readme_that_is_altered_is_found(by, tmp_path):
    page = tmp_path / "README.md"
    text = (evidence.ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("## Five figures")
    figures = list(re.finditer(r"\d?\.\d+", text[start : text.index("\n[Performance]", start)]))
    assert len(figures) > 10
    for figure in figures:
        place = start + figure.end() - 1
        altered = f"{text[:place]}{(int(text[place]) + by) % 10}{text[place + 1 :]}"
        page.write_text(altered, encoding="utf-8")
        assert len(evidence.check([page])) == 1, figure[0]


def test_full_runs_are_kept_and_quick_checks_are_not(folder, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    more = "More.\n\n| page |\n| --- |\n"
    (folder / "evidence" / "README.md").write_text(f"# Evidence\n\n| folder |\n| --- |\n\n{more}")
    for name in ("rows.csv", "curves.png", "kept.json"):
        (results / name).write_text("1\n")
    settings = {"quick": False, "seconds": 120, "device": "1 × cpu"}
    (results / "settings.json").write_text(json.dumps(settings))
    evidence.keep(results, "new", "bilevax reproduce new", folder / "evidence")
    (folder / "evidence" / "new" / "old.csv").write_text("1\n")
    kept = evidence.keep(results, "new", "bilevax reproduce new", folder / "evidence")  # is listed once
    assert {path.name for path in kept} == {"rows.csv", "curves.png", "settings.json"}
    assert {path.name for path in (folder / "evidence" / "new").iterdir()} == {path.name for path in kept}
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
