"""Links of the pages, which lead to files of the repository, as links of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

FORGE = "https://github.com/bilevax/bilevax"
_CODE = re.compile(r"(^```.*?^```|^~~~.*?^~~~|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def anchor(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as forges make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", separator)


def with_titles(text: str, titles: dict[str, str]) -> str:
    """Links that are named after a file of docs/, as a forge shows it, named after the page's title."""
    return re.sub(r"\[(\w+\.md)\](?=\()", lambda found: f"[{titles.get(found[1], found[1])}]", text)


def for_the_site(
    text: str, source: str, place: str, pages: dict[str, str], is_folder: Callable[[str], bool]
) -> str:
    """A page's Markdown with links that hold on the site.

    Args:
      text: the Markdown.
      source: the file in the repository that the text comes from, `docs/paper.md`.
      place: where it is on the site, `paper.md`.
      pages: the places on the site of the files that are there, by their paths in the repository.
      is_folder: whether a path in the repository is a folder.

    Returns:
      The text, with links to other pages relative to `place`. Those to other files lead to the forge.
    """

    def changed(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        anchor = found[2] or ""
        if target in pages:
            return posixpath.relpath(pages[target], posixpath.dirname(place) or ".") + anchor
        return f"{FORGE}/{'tree' if is_folder(target) else 'blob'}/main/{target}{anchor}"

    parts = _CODE.split(text)
    return "".join(part if k % 2 else _LINK.sub(changed, part) for k, part in enumerate(parts))
