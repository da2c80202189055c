"""Compares the files in a wheel with those that git tracks under `bilevax/`.

    python scripts/compare_wheel.py dist/bilevax-0.1.0-py3-none-any.whl

The package must hold exactly the tracked files: a module that is missing breaks an import on somebody else's
machine, and one too many is a file that nobody reviewed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "bilevax"
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def differences(packed: Iterable[str], tracked: Iterable[str], metadata: str) -> list[str]:
    """What differs between the files of a wheel and the tracked ones; empty if nothing does.

    `metadata` is the name of the wheel's metadata folder, such as `bilevax-0.1.0.dist-info`.
    """
    expected = set(tracked) | {f"{metadata}/{name}" for name in METADATA}
    found = set(packed)
    missing = [f"{name} is missing from the wheel" for name in sorted(expected - found)]
    extra = [f"{name} is in the wheel, but not tracked by git" for name in sorted(found - expected)]
    return missing + extra


def tracked_files() -> list[str]:
    """The files under `bilevax/` that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", PACKAGE], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name]


def main(arguments: list[str]) -> int:
    """Prints every difference; returns the exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    wheel = Path(arguments[0])
    with zipfile.ZipFile(wheel) as archive:
        packed = [name for name in archive.namelist() if not name.endswith("/")]
    name, version = wheel.name.split("-")[:2]
    found = differences(packed, tracked_files(), f"{name}-{version}.dist-info")
    for difference in found:
        print(difference, file=sys.stderr)
    if not found:
        print(f"{wheel.name}: {len(packed)} files, as expected")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
