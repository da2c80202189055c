"""Notebooks from the programs of the gallery: `make notebooks` writes them to build/notebooks.

The docstring becomes text, and every paragraph of the program a cell: a function or class with the
comment above it, or lines up to the next blank line. The last cell shows the picture. Notebooks are not
kept, because programs are easier to read in a diff, to test and to lint.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def cells_of(source: str) -> list[str]:
    """The paragraphs of a program after its docstring, all imports in one."""
    parts = list(paragraphs(source))
    imports = [part for part in parts if _only_imports(part)]
    return ["\n\n".join(imports), *(part for part in parts if part not in imports)]


def _only_imports(part: str) -> bool:
    return all(isinstance(one, ast.Import | ast.ImportFrom) for one in ast.parse(part).body)


def paragraphs(source: str) -> Iterator[str]:
    """The parts of a program after its docstring that are separated by blank lines between statements."""
    lines = source.splitlines()
    body = ast.parse(source).body[1:]
    # Blank lines within a statement, such as a function, separate nothing.
    inside = {line for one in body for line in range(_first(one), (one.end_lineno or 0) + 1)}
    part: list[str] = []
    start = ast.parse(source).body[0].end_lineno or 0
    for number, line in enumerate(lines[start:], start + 1):
        if line.strip() or number in inside:
            part.append(line)
        elif part:
            yield "\n".join(part)
            part = []
    if part:
        yield "\n".join(part)


def _first(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def notebook(path: Path) -> dict[str, Any]:
    """The notebook of a program, in the format of Jupyter (nbformat 4.5)."""
    source = path.read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    picture = f"{path.stem}.png"
    # A notebook has no command line: the program sees no options, and writes its picture beside the notebook.
    # Some programs start themselves again, for which they need their own file.
    setting = f'import sys\n\n__doc__ = "{title}"\n__file__ = "{path.name}"\nsys.argv = ["{path.name}"]'
    cells = [_cell("markdown", f"# {title}\n{text}"), _cell("code", setting)]
    cells += [_cell("code", part) for part in cells_of(source)]
    cells.append(_cell("code", f'from IPython.display import Image\n\nImage("{picture}")'))
    for number, cell in enumerate(cells):
        cell["id"] = f"{path.stem.replace('_', '-')}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell if kind == "markdown" else cell | {"execution_count": None, "outputs": []}


def main(folder: str = "build/notebooks") -> None:
    """Writes a notebook, and the program beside it, for every program of the gallery."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "examples").glob("*.py")):
        (target / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        made = json.dumps(notebook(path), indent=1, ensure_ascii=False)
        (target / f"{path.stem}.ipynb").write_text(made + "\n", encoding="utf-8")
        print(target / f"{path.stem}.ipynb")


if __name__ == "__main__":
    main(*sys.argv[1:])
