"""Counts the files of bilevax that the quick start's `minimize` call goes through.

    .venv/bin/python scripts/trace_call.py --path                  # the installed package
    PYTHONPATH=/another/checkout .venv/bin/python scripts/trace_call.py

It runs docs/quickstart.md beside the package, with one step, so that the figures depend on no clock. They
cover the start, the tracing of the compiled programs, and the end. A switch is a call or a return that
leads from one file of the package to another. `--path` lists the files with their calls, in the order in
which they are first entered.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import bilevax as bx

PACKAGE = Path(bx.__file__).parent


class Trace:
    """The files of the package whose functions are called, in order; use it in a `with` statement.

    Attributes:
      calls: the calls of a function of each file, in the order in which the files are first entered.
      switches: how often a call or a return leads from one file of the package to another.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.switches = 0
        self._stack: list[str] = []

    def __enter__(self) -> Trace:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(f"{PACKAGE}{os.sep}"):
            return
        file = Path(path).relative_to(PACKAGE).as_posix()
        if event == "call":
            self.calls[file] = self.calls.get(file, 0) + 1
        else:
            self._stack.pop()
        self.switches += bool(self._stack) and self._stack[-1] != file
        if event == "call":
            self._stack.append(file)


def quick_start() -> str:
    """The example of docs/quickstart.md beside the package."""
    text = (PACKAGE.parent / "docs" / "quickstart.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise SystemExit("docs/quickstart.md has no example")
    return found[1].split("weights = ")[0]


def main() -> None:
    """Traces the call, and prints what it found."""
    trace, minimize = Trace(), bx.minimize

    def traced(*args: Any, **options: Any) -> Any:
        with trace:
            return minimize(*args, **(options | {"steps": 1, "progress": None}))

    bx.minimize = traced
    exec(quick_start(), {})
    print(f"{len(trace.calls)} files, {trace.switches} switches between files")
    if "--path" in sys.argv:
        for file, calls in trace.calls.items():
            print(f"{calls:6,} {file}")


if __name__ == "__main__":
    main()
