"""The API reference: pages made from the tables of docs/api.md, and a check that no public name is missing.

A section of docs/api.md is a page of the reference. Comments name the page and the module of each table:

    <!-- page: problem -->
    <!-- module: bilevax -->
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "api.md"
MODULES = (
    "bilevax",
    "bilevax.theory",
    "bilevax.solvers.toolkit",
    "bilevax.testing",
    "bilevax.data",
    "bilevax.applications",
    "bilevax.applications.auc",
    "bilevax.applications.grouped",
    "bilevax.applications.ranking",
)
# Of other methods only the hyper-parameters are shown: what they override is described with these.
OPEN = ("AbstractSolver", "Recipe", "Restart")
_MODULE = re.compile(r"^<!-- module: ([\w.]+) -->$", re.MULTILINE)
_PAGE = re.compile(r"^<!-- page: (\w+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Name:
    """A public name, and what docs/api.md says about it."""

    module: str
    name: str
    says: str

    @property
    def path(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Section:
    """A section of docs/api.md, which is a page of the reference."""

    title: str
    page: str
    names: tuple[Name, ...]


def sections(text: str) -> list[Section]:
    """The sections of docs/api.md that name a page."""
    found: list[Section] = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        page = _PAGE.search(part)
        if page is None:
            continue
        pieces = _MODULE.split(part)
        names = [
            Name(module, name, row[1].strip())
            for module, table in zip(pieces[1::2], pieces[2::2], strict=True)
            for row in re.findall(r"^\| ([^|]*`[^|]*) \|(.*)\|$", table, re.MULTILINE)
            for name in re.findall(r"`(\w+)`", row[0])
        ]
        found.append(Section(part.split("\n")[0], page[1], tuple(names)))
    return found


def exported(module: str) -> list[str]:
    """`__all__` of a module, read from its file."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets
        ):
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{file} has no __all__")


def problems(text: str) -> list[str]:
    """Public names that docs/api.md does not list, and names that it lists and that are not public."""
    listed = [name.path for section in sections(text) for name in section.names]
    public = {f"{module}.{name}" for module in MODULES for name in exported(module)}
    missing = [f"{name} is public, but not in docs/api.md" for name in sorted(public - set(listed))]
    strange = [f"{name} is in docs/api.md, but not public" for name in sorted(set(listed) - public)]
    twice = [
        f"{name} is in docs/api.md twice" for name in sorted({one for one in listed if listed.count(one) > 1})
    ]
    return missing + strange + twice


def origin(module: str, name: str) -> str:
    """Where a public name is defined: the path that all modules that export it share."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists() or _is_module(f"{module}.{name}"):
        return f"{module}.{name}"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                if (one.asname or one.name) == name and node.module.split(".")[0] == "bilevax":
                    return origin(node.module, one.name)
    return f"{module}.{name}"


def _is_module(path: str) -> bool:
    place = ROOT.joinpath(*path.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def pages(text: str) -> dict[str, str]:
    """The pages of the reference, by place. A name that two modules export is documented once."""
    shown: dict[str, str] = {}
    made: dict[str, str] = {}
    modules = {one: section for section in sections(text) for one in {name.module for name in section.names}}
    for section in sections(text):
        lines = [f"# {section.title}\n"]
        module = None
        for name in section.names:
            if name.module != module:
                module = name.module
                lines.append(f"Names of `{module}`.\n")
            place = origin(name.module, name.name)
            heading = f"## `{name.name}` {{ #{name.path} }}\n"
            if place in shown:
                lines.append(f"{heading}\nThe same as [`{shown[place]}`][{shown[place]}].\n")
            elif place in modules:
                lines.append(f"{heading}\nA module: {name.says}. [Its names]({modules[place].page}.md).\n")
            elif name.name == "__version__":
                # Python-Markdown takes the underscores for emphasis, so that no heading can have this anchor.
                lines.append(f'## `{name.name}`\n\n<a id="{name.path}"></a>A text: {name.says}.\n')
            elif _is_module(place):
                options = "    options: {show_root_heading: false, heading_level: 3}"
                lines.append(f"{heading}\nA module: {name.says}.\n\n::: {place}\n{options}\n")
            elif place.startswith("bilevax.solvers.") and name.name not in OPEN:
                lines.append(f"::: {name.path}\n    options: {{members: false}}\n")
            else:
                lines.append(f"::: {name.path}\n")
            shown.setdefault(place, name.path)
        made[f"api/{section.page}.md"] = "\n".join(lines)
    return made


def linked(text: str) -> str:
    """docs/api.md with a link at every name in the first column of its tables."""
    found = {name: part.page for part in sections(text) for name in part.names}
    pieces = _MODULE.split(text)
    for k in range(1, len(pieces), 2):
        module = pieces[k]

        def with_links(row: re.Match[str], module: str = module) -> str:
            def link(one: re.Match[str]) -> str:
                path = f"{module}.{one[1]}"
                page = next((page for name, page in found.items() if name.path == path), None)
                return one[0] if page is None else f"[{one[0]}](api/{page}.md#{path})"

            names = re.sub(r"`(\w+)`", link, row[1])
            return f"| {names} |"

        pieces[k + 1] = re.sub(r"^\| ([^|]*`[^|]*) \|", with_links, pieces[k + 1], flags=re.MULTILINE)
        pieces[k] = f"<!-- module: {module} -->"
    return "".join(pieces)
