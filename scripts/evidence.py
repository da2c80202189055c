"""Evidence for figures in the docs: keeps the results of a full run, and compares tables with what is kept.

    python -m scripts.evidence check
    python -m scripts.evidence keep results/ndcg-paper ndcg-paper "bilevax reproduce ndcg --protocol paper"

`keep` copies tables, settings, captions and figures of a folder of results to docs/evidence, and adds a line
to its README with the command and the last commit.

`check` reads README.md and docs/*.md. A table belongs to evidence if the line before it is a comment such as

    <!-- evidence: restarts/restarts.csv -->

Then every cell that is a figure (5, .0622, 3.5e-4, 579 ± 105) must be that of the CSV file, rounded as in the
table, and the figures of one row must be found in one or two rows of the file. Everywhere else, a row of a
table that links to a folder of evidence is compared too: its figures with ± must be in some table of it.
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

Figure = tuple[Decimal, ...]  # a number, or a number and its ± part


class Problem(NamedTuple):
    """A row of a document whose figures are not those of its evidence."""

    document: str
    line: int
    text: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: not the figures of {self.evidence}: {self.text}"


def check(documents: list[Path], folder: Path = FOLDER) -> list[Problem]:
    """The rows that differ from their evidence."""
    return [problem for path in documents for problem in _document_problems(path, folder)]


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
        elif source is not None:
            if not _covered(cell_figures(line), _rows(folder / source)):
                yield Problem(path.name, number, line, source)
        else:
            for name in _LINK.findall(line):
                rows = [row for table in (folder / name).glob("*.csv") for row in _rows(table)]
                known = [figure for row in rows for figure in row]
                uncertain = [figure for figure in text_figures(line) if len(figure) == 2]
                if not all(any(agree(one, other) for other in known) for one in uncertain):
                    yield Problem(path.name, number, line, name)


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
    last = max(place for place, line in enumerate(lines) if line.startswith("|"))
    readme.write_text("\n".join([*lines[: last + 1], row, *lines[last + 1 :]]) + "\n", encoding="utf-8")
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
