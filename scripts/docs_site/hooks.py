"""What MkDocs calls while it builds the site: pages from other files, links, mathematics, last checks."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

from scripts.docs_site import api, gallery, links, mathematics

ROOT = Path(__file__).resolve().parent.parent.parent
# Files of the repository that are pages of the site, by their place there.
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
_OUTSIDE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>|<link\b[^>]*>"""
)


def on_config(config: Any) -> Any:
    """Puts the pages of the gallery into the navigation, and gives headings the anchors of a forge."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = links.anchor
    own = [f"gallery/{one.name}.md" for one in gallery.examples()]
    config["nav"] = [
        {"Gallery": [part["Gallery"], *own]} if "Gallery" in part else part for part in config["nav"]
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made from other files."""
    text = api.PAGE.read_text(encoding="utf-8")
    found = gallery.examples()
    _raise(api.problems(text) + gallery.missing(found))
    made = api.pages(text) | gallery.pages(found)
    made |= {place: (ROOT / name).read_text(encoding="utf-8") for place, name in ELSEWHERE.items()}
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that hold on the site."""
    place = page.file.src_uri
    source = ELSEWHERE.get(place, f"docs/{place}")
    pages = {f"docs/{one.src_uri}": one.src_uri for one in files if one.inclusion.is_included()}
    pages |= {name: place for place, name in ELSEWHERE.items()}
    pages |= {f"examples/{one.name}.py": f"gallery/{one.name}.md" for one in gallery.examples()}
    pages["README.md"] = "index.md"
    if place == "api.md":
        markdown = api.linked(markdown)
    markdown = links.with_titles(markdown, _titles())
    return links.for_the_site(markdown, source, place, pages, lambda path: (ROOT / path).is_dir())


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Mathematics as MathML."""
    try:
        return mathematics.rendered(html)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def on_post_build(config: Any) -> None:
    """Checks that every public name is in the reference, and that nothing is loaded from elsewhere."""
    site = Path(config["site_dir"])
    found: list[str] = []
    for section in api.sections(api.PAGE.read_text(encoding="utf-8")):
        html = (site / "api" / f"{section.page}.html").read_text(encoding="utf-8")
        found += [
            f"{one.path} is not on api/{section.page}.html"
            for one in section.names
            if f'id="{one.path}"' not in html
        ]
    for path in sorted(site.rglob("*.html")):
        for tag in _OUTSIDE.findall(path.read_text(encoding="utf-8")):
            if not tag.startswith("<link") or re.search(r'href="(?:https?:)?//', tag):
                found.append(f"{path.relative_to(site)} loads something from elsewhere: {tag}")
    _raise(found)


@functools.cache
def _titles() -> dict[str, str]:
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    return {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}


def _raise(problems: list[str]) -> None:
    if problems:
        raise PluginError("\n".join(problems))
