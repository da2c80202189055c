"""The gallery: a page for every script in examples/, with its code and the picture that it draws.

The pictures are docs/gallery/<name>.png, made by `make gallery`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
PICTURES = ROOT / "docs" / "gallery"


@dataclass(frozen=True)
class Example:
    """A script: its name, the first line of its docstring, the rest of it, and the code without it."""

    name: str
    title: str
    text: str
    code: str

    @property
    def picture(self) -> Path:
        """Where its picture is kept."""
        return PICTURES / f"{self.name}.png"


def examples(folder: Path = EXAMPLES) -> list[Example]:
    """All scripts of a folder; raises `ValueError` for one without a docstring."""
    return [_read(path) for path in sorted(folder.glob("*.py"))]


def _read(path: Path) -> Example:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    if not docstring:
        raise ValueError(f"{path} has no docstring, expected one whose first line is the title")
    title, _, text = docstring.partition("\n")
    end = tree.body[0].end_lineno or 0
    return Example(path.stem, title.rstrip("."), text.strip(), "\n".join(source.split("\n")[end:]).strip())


def missing(found: list[Example]) -> list[str]:
    """The pictures that are not there. None is asked for before `make gallery` has made the first."""
    if not PICTURES.is_dir():
        return []
    names = {one.name for one in found}
    absent = [
        f"docs/gallery/{one.name}.png is missing: run make gallery"
        for one in found
        if not one.picture.exists()
    ]
    strays = [path for path in sorted(PICTURES.glob("*.png")) if path.stem not in names]
    return absent + [f"docs/gallery/{path.name} belongs to no script in examples/" for path in strays]


def pages(found: list[Example]) -> dict[str, str]:
    """The pages of the gallery, by place on the site."""
    made = {f"gallery/{one.name}.md": _page(one) for one in found}
    return {"gallery/index.md": _index(found)} | made


def _picture(one: Example) -> str:
    return f"![What examples/{one.name}.py draws]({one.name}.png)\n\n" if one.picture.exists() else ""


def _page(one: Example) -> str:
    command = f"python examples/{one.name}.py --picture {one.name}.png"
    return (
        f"# {one.title}\n\n{one.text}\n\n{_picture(one)}"
        f"`{command}` draws it; `--quick` is a check that takes less.\n\n"
        f"```py\n{one.code}\n```\n"
    )


def _index(found: list[Example]) -> str:
    cards = "\n".join(
        f'<a class="card" href="{one.name}.html">'
        + (f'<img src="{one.name}.png" alt="" loading="lazy">' if one.picture.exists() else "")
        + f"<span>{one.title}</span></a>"
        for one in found
    )
    return (
        "# Gallery\n\nScripts that run as they are, each of which ends in a picture. `make gallery` draws "
        f'all of them.\n\n<div class="cards">\n{cards}\n</div>\n'
    )
