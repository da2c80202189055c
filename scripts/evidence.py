"""Evidence for figures in the docs: keeps the results of a full run, and compares tables with what is kept.

    python -m scripts.evidence check
    python -m scripts.evidence keep results/ndcg-paper ndcg-paper "bilevax reproduce ndcg --protocol paper"

`keep` copies tables, settings, captions and figures of a folder of results to docs/evidence, and adds a line
to its README with the command and the last commit.

`check` reads README.md and docs/*.md. A table belongs to evidence if the line before it is a comment such as

    <!-- evidence: restarts/restarts.csv -->

Then every cell that is a figure (5, .0622, 3.5e-4, 579 ± 105) must be that of the CSV file, rounded as in the
table, and the figures of one row must be found in one or two rows of the file. Figures within words are
compared as elsewhere.

Everywhere else, in a paragraph or in a row of another table, every figure with a decimal point, an exponent
or ± must be in a file of evidence, rounded alike: of the folders that the paragraph or the row links to, or
else of those that its section names. So must a whole number that is a cell of its own, from 10 on; within
words it may be a size or a count, and is not compared. Figures within code are settings, and are not compared
either. What is in no file must be said in a comment of the section:

    <!-- derived: 1.02 = 22.9 / 22.4 -->             the result of figures that are in its files
    <!-- given: 0.2 0.3; noise levels -->            no measurement of ours; why
"""

from __future__ import annotations

import argparse
import ast
import csv
import itertools
import json
import math
import operator
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
MOST_ROWS = 200  # of a table whose figures a text may have
LEAST_WHOLE = 10  # below it a whole number is a count

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: ± ({_NUMBER}))?")
_MARK = re.compile(r"<!-- evidence: (\S+) -->")
_GIVEN = re.compile(r"<!-- given: ([^;]+);.+?-->", re.DOTALL)
_DERIVED = re.compile(r"<!-- derived: (.+?) -->", re.DOTALL)
_LINK = re.compile(r"\]\((?:docs/)?evidence/([\w-]+)\)")
_NOT_COMPARED = re.compile(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.DOTALL)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Figure = tuple[Decimal, ...]  # a number, or a number and its ± part


class Problem(NamedTuple):
    """A place in a document with figures that no evidence has."""

    document: str
    line: int
    text: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: not the figures of {self.evidence}: {self.text}"


class Section(NamedTuple):
    """The lines from one heading to the next, without code, and the number of the first."""

    first: int
    lines: list[str]


class Sources(NamedTuple):
    """Folders of evidence by name, and figures that a section gives beside them."""

    names: list[str]
    beside: list[Figure]


def check(documents: list[Path], folder: Path = FOLDER) -> list[Problem]:
    """The rows and paragraphs with figures that differ from their evidence, or have none."""
    return [
        Problem(path.name, *found)
        for path in documents
        for section in sections(path.read_text(encoding="utf-8"))
        for found in _problems(section, folder)
    ]


def sections(text: str) -> Iterator[Section]:
    """The sections of a page."""
    section, fenced = Section(1, []), False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") and not fenced:
            yield section
            section = Section(number, [])
        fence = line.startswith("```")
        section.lines.append("" if fence or fenced or line.startswith(("    ", "#")) else line)
        fenced ^= fence
    yield section


def _problems(section: Section, folder: Path) -> Iterator[tuple[int, str, str]]:
    """The number of a line, its text, and the evidence that does not have its figures."""
    text = "\n".join(section.lines)
    marked = _MARK.findall(text)
    names = [*dict.fromkeys([*(source.split("/")[0] for source in marked), *_LINK.findall(text)])]
    given = [figure for found in _GIVEN.findall(text) for figure in text_figures(found)]
    sources, number = Sources(names, given), section.first
    for equation in _DERIVED.findall(text):
        result, holds = _derived(equation, sources, folder)
        if not holds:
            yield section.first, equation, ", ".join(names)
        sources.beside.append(result)
    source = None
    for kind, lines in itertools.groupby(section.lines, _kind):
        part = list(lines)
        if kind == "mark":
            source = _MARK.findall(part[-1])[-1]
            if not (folder / source).is_file():
                yield number, "there is no such file", source
                source = None
        elif kind == "table":
            for place, row in enumerate(part, number):
                if source is not None and not _covered(cell_figures(row), _rows(folder / source)):
                    yield place, row, source
                yield from _linked(place, row if source is None else _words(row), sources, folder)
                if source is None:
                    yield from _whole_cells(place, row, sources, folder)
            source = None
        elif kind == "text":
            source = None
            yield from _linked(number, "\n".join(part), sources, folder)
        number += len(part)


def _kind(line: str) -> str:
    if _MARK.fullmatch(line.strip()):
        return "mark"
    return "table" if line.startswith("|") else "text" if line.strip() else "nothing"


def _linked(number: int, text: str, sources: Sources, folder: Path) -> Iterator[tuple[int, str, str]]:
    """Measured figures must be in the folders that a text links to, or in those of its section."""
    names = _LINK.findall(text) or sources.names
    # A whole number is none of them: 1.00 is not read off a 1.
    known = {one for one in _known(names, folder) if _measured(one)} | set(sources.beside)
    for match in _FIGURE.finditer(_plain(_NOT_COMPARED.sub(" ", text))):
        figure = _figure(match)
        if _measured(figure) and not any(agree(figure, other) for other in known):
            yield number, match[0], ", ".join(names) or "any evidence"


def _whole_cells(number: int, row: str, sources: Sources, folder: Path) -> Iterator[tuple[int, str, str]]:
    """Whole numbers that are cells of their own must be there too, unless they may be counts."""
    names = _LINK.findall(row) or sources.names
    known = _known(names, folder) | set(sources.beside)
    for figure in cell_figures(row):
        large = not _measured(figure) and figure[0] >= LEAST_WHOLE
        if large and not any(agree(figure, other) for other in known):
            yield number, str(figure[0]), ", ".join(names) or "any evidence"


def _measured(figure: Figure) -> bool:
    return len(figure) == 2 or int(figure[0].as_tuple().exponent) < 0


def _plain_number(figure: Figure) -> bool:
    return not _measured(figure) and figure[0] <= 100


def _known(names: list[str], folder: Path) -> set[Figure]:
    """The figures of the tables and of the settings in some folders; curves have nearly every figure."""
    tables = [_rows(table) for name in names for table in (folder / name).glob("*.csv")]
    found = {figure for rows in tables if len(rows) <= MOST_ROWS for row in rows for figure in row}
    for name in names:
        if (folder / name / "settings.json").exists():
            found.update(text_figures((folder / name / "settings.json").read_text(encoding="utf-8")))
    return found


def _derived(equation: str, sources: Sources, folder: Path) -> tuple[Figure, bool]:
    """The figure on the left of an equation, and whether the right side gives it from known figures."""
    left, _, right = _plain(equation).partition(" = ")
    figure, known = text_figures(left)[0], _known(sources.names, folder) | set(sources.beside)
    tree = ast.parse(right, mode="eval").body
    operands = [(Decimal(str(node.value)),) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    held = all(any(agree(one, other) for other in known) for one in operands if not _plain_number(one))
    return figure, held and agree(figure, (Decimal(_value(tree)),))


def _value(node: ast.expr) -> float:
    """The value of an expression of figures, sums, products and `log`."""
    match node:
        case ast.Constant(value=value):
            return float(value)  # pyright: ignore[reportArgumentType]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Call(func=ast.Name(id="log"), args=[argument]):
            return math.log(_value(argument))
        case _:
            raise ValueError(f"an equation has figures, + - * / and log, got {ast.unparse(node)}")


def cell_figures(line: str) -> list[Figure]:
    """The cells of a table's row that are figures and nothing else."""
    return [_figure(match) for cell in _cells(line) if (match := _FIGURE.fullmatch(_plain(cell)))]


def _words(line: str) -> str:
    """The other cells."""
    return " | ".join(cell for cell in _cells(line) if not _FIGURE.fullmatch(_plain(cell)))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


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
    shutil.rmtree(target, ignore_errors=True)  # what an earlier run wrote is not evidence of this one
    target.mkdir(parents=True)
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
