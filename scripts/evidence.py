"""Evidence for figures in the docs: keeps the results of a full run, and compares tables with what is kept.

    python -m scripts.evidence check
    python -m scripts.evidence keep results/ndcg-paper ndcg-paper "bilevax reproduce ndcg --protocol paper"

`keep` copies tables, settings, captions and figures of a folder of results to docs/evidence, and adds a line
to its README with the command and the last commit.

`check` reads README.md and docs/*.md. A table belongs to evidence if the line before it is a comment such as

    <!-- evidence: restarts/restarts.csv -->

Then every cell that is a figure (5, .0622, 3.5e-4, 579 ± 105) must be that of the CSV file, rounded as in the
table, and the figures of one row must be found in one or two rows of the file. Everywhere else, a row of a
table or a paragraph that links to a folder of evidence is compared too: its figures with ± must be in some
table of it. A table of measured figures without a mark must be in a section that docs/evidence/README.md
lists under "Not kept", with the command that wrote it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"
KEPT = (".csv", ".md", ".png", ".pdf")
MOST_BYTES = 5_000_000

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: ± ({_NUMBER}))?")
_MARK = re.compile(r"<!-- evidence: (\S+) -->")
_LINK = re.compile(r"\]\((?:docs/)?evidence/([\w-]+)\)")
_LISTED = re.compile(r"\| \[([\w.]+)\]\([^)]*\) \| ([^|]+) \| `[^`]+`.*")
_FEW = 3  # figures with a decimal point or ± make a table one of measurements

Figure = tuple[Decimal, ...]  # a number, or a number and its ± part


class Problem(NamedTuple):
    """A place in a document whose figures are not those of its evidence, or have none."""

    document: str
    line: int
    text: str
    evidence: str | None

    def __str__(self) -> str:
        wrong = f"not the figures of {self.evidence}" if self.evidence else "a table without evidence"
        return f"{self.document}:{self.line}: {wrong}: {self.text}"


def check(documents: list[Path], folder: Path = FOLDER) -> list[Problem]:
    """The rows and paragraphs that differ from their evidence, and the tables that have none."""
    listed = not_kept(folder)
    return [
        problem
        for path in documents
        for problem in (*_document_problems(path, folder), *_without_evidence(path, listed))
    ]


def not_kept(folder: Path = FOLDER) -> set[tuple[str, str]]:
    """The pages and sections with tables whose files are not kept, from the README of the evidence."""
    readme = folder / "README.md"
    lines = readme.read_text(encoding="utf-8").splitlines() if readme.exists() else []
    return {(found[1], found[2].strip()) for line in lines if (found := _LISTED.fullmatch(line))}


def measured_tables(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the section and the head of every table of measurements without a mark."""
    section, lines = "", path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#"):
            section = line.strip("# ")
        if not line.startswith("|") or lines[number - 1].startswith("|"):
            continue
        marked = any(_MARK.fullmatch(before.strip()) for before in lines[max(0, number - 2) : number])
        rows = itertools.takewhile(lambda row: row.startswith("|"), lines[number:])
        if not marked and sum(map(_measured, [one for row in rows for one in cell_figures(row)])) >= _FEW:
            yield number + 1, section, line


def _measured(figure: Figure) -> bool:
    return len(figure) == 2 or int(figure[0].as_tuple().exponent) < 0


def _without_evidence(path: Path, listed: set[tuple[str, str]]) -> Iterator[Problem]:
    for line, section, head in measured_tables(path):
        if (path.name, section) not in listed:
            yield Problem(path.name, line, head, None)


def _document_problems(path: Path, folder: Path) -> Iterator[Problem]:
    lines = path.read_text(encoding="utf-8").splitlines()
    source = None
    for number, line in enumerate(lines, 1):
        mark = _MARK.fullmatch(line.strip())
        if mark:
            source = mark[1]
            if not (folder / source).is_file():
                yield Problem(path.name, number, "there is no such file", source)
                source = None
        elif not line.startswith("|"):
            source = source if not line.strip() and _MARK.fullmatch(lines[number - 2].strip()) else None
            if number == 1 or not lines[number - 2].strip():  # a paragraph begins
                yield from _linked(path, number, "\n".join(_paragraph(lines[number - 1 :])), folder)
        elif source is not None:
            if not _covered(cell_figures(line), _rows(folder / source)):
                yield Problem(path.name, number, line, source)
        else:
            yield from _linked(path, number, line, folder)


def _paragraph(lines: list[str]) -> Iterator[str]:
    return itertools.takewhile(lambda line: line.strip() and not line.startswith("|"), lines)


def _linked(path: Path, number: int, text: str, folder: Path) -> Iterator[Problem]:
    """Figures with ± in a text that links to evidence must be in one of the folders that it links to."""
    names = _LINK.findall(text)
    rows = [row for name in names for table in (folder / name).glob("*.csv") for row in _rows(table)]
    known = [figure for row in rows for figure in row]
    uncertain = [figure for figure in text_figures(text) if len(figure) == 2]
    if names and not all(any(agree(one, other) for other in known) for one in uncertain):
        yield Problem(path.name, number, text, ", ".join(names))


def cell_figures(line: str) -> list[Figure]:
    """The cells of a table's row that are figures and nothing else."""
    cells = (_plain(cell).strip() for cell in line.strip().strip("|").split("|"))
    return [_figure(match) for cell in cells if (match := _FIGURE.fullmatch(cell))]


def text_figures(text: str) -> list[Figure]:
    """All figures of a text; of a figure with ±, also the first part alone."""
    found = [_figure(match) for match in _FIGURE.finditer(_plain(text))]
    return found + [figure[:1] for figure in found if len(figure) == 2]


def agree(written: Figure, measured: Figure) -> bool:
    """Whether a measured figure, rounded as the written one, is the written one."""
    return len(written) == len(measured) and all(
        2 * abs(one - other) <= Decimal(1).scaleb(int(one.as_tuple().exponent))
        for one, other in zip(written, measured, strict=True)
    )


def _covered(written: list[Figure], rows: list[list[Figure]]) -> bool:
    """Whether one or two rows have all the figures."""
    held = [{place for place, one in enumerate(written) if any(agree(one, o) for o in row)} for row in rows]
    needed = set(range(len(written)))
    return any(one | other >= needed for one, other in itertools.product(held, held))


def _rows(path: Path) -> list[list[Figure]]:
    """The figures of the head of a CSV file, and of every row with those of the head."""
    with path.open(encoding="utf-8", newline="") as file:
        table = [[figure for cell in row for figure in text_figures(cell)] for row in csv.reader(file)]
    return [table[0], *(table[0] + row for row in table[1:])]


def _plain(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("**", "").replace("−", "-"))


def _figure(match: re.Match[str]) -> Figure:
    return tuple(Decimal(part) for part in match.groups() if part is not None)


def keep(results: Path, name: str, command: str, folder: Path = FOLDER) -> list[Path]:
    """Copies what is worth keeping of a folder of results, and writes a line about it.

    Raises:
      ValueError: the results are those of a quick check, or too large.
    """
    settings = json.loads((results / "settings.json").read_text(encoding="utf-8"))
    if settings.get("quick"):
        raise ValueError(f"results must be of a full run, got a quick check in {results}")
    chosen = [path for path in sorted(results.iterdir()) if path.suffix in KEPT]
    size = sum(path.stat().st_size for path in chosen)
    if size > MOST_BYTES:
        raise ValueError(f"results must be at most {MOST_BYTES:,} bytes, got {size:,} in {results}")
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    kept = [Path(shutil.copy(path, target)) for path in (*chosen, results / "settings.json")]
    subject = subprocess.run(
        ["git", "log", "-1", "--format=%s"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    seconds = settings.get("seconds", 0)
    row = f"| [{name}]({name}) | `{command}` | “{subject}” | {seconds / 60:.0f} | {settings['device']} |"
    readme = folder / "README.md"
    lines = [line for line in readme.read_text(encoding="utf-8").splitlines() if f"]({name})" not in line]
    first = next(place for place, line in enumerate(lines) if line.startswith("|"))
    end = first + sum(1 for _ in itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))
    readme.write_text("\n".join([*lines[:end], row, *lines[end:]]) + "\n", encoding="utf-8")
    return kept


def documents() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Checks or keeps evidence."""
    parser = argparse.ArgumentParser("python -m scripts.evidence")
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("check", help="compare tables with evidence")
    keeping = commands.add_parser("keep", help="keep the results of a full run")
    keeping.add_argument("results", type=Path)
    keeping.add_argument("name")
    keeping.add_argument("command", help="that wrote the results")
    given = parser.parse_args()
    if given.do == "keep":
        print(*keep(given.results, given.name, given.command), sep="\n")
        return
    found = check(documents())
    for problem in found:
        print(problem)
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
