"""Checks that a tag, `bilevax/version.py` and `CHANGELOG.md` describe the same release.

python scripts/check_release.py v0.1.0
"""

from __future__ import annotations

import datetime
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "Unreleased"


def sections(changelog: str) -> dict[str, tuple[str, str]]:
    """The heading and the text of each `## [name] …` section, by name, in the order of the file."""
    parts = re.split(r"^(## \[([^\]]+)\].*)$", changelog, flags=re.MULTILINE)[1:]
    return {
        name: (heading.strip(), text.strip())
        for heading, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """What keeps the tag from being released; empty if nothing does."""
    found: list[str] = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, but bilevax/version.py says {version}: expected the tag v{version}")
    by_name = sections(changelog)
    if version not in by_name:
        found.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
        return found
    heading, text = by_name[version]
    date = re.fullmatch(re.escape(f"## [{version}] - ") + r"(\d{4}-\d\d-\d\d)", heading)
    if date is None or not _is_date(date[1]):
        found.append(f"CHANGELOG.md: expected '## [{version}] - YYYY-MM-DD', got '{heading}'")
    if not text:
        found.append(f"CHANGELOG.md: the section of {version} is empty")
    newest = next((name for name in by_name if name != UNRELEASED), None)
    if newest != version:
        found.append(f"CHANGELOG.md: the newest release is {newest}, expected {version}")
    if by_name.get(UNRELEASED, ("", ""))[1]:
        found.append(f"CHANGELOG.md: '## [{UNRELEASED}]' still lists changes; move them to '## [{version}]'")
    return found


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Prints every problem of the tag; returns the exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    version: str = runpy.run_path(str(ROOT / "bilevax" / "version.py"))["__version__"]
    found = problems(arguments[0], version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
