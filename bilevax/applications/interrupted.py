"""The line that an estimator prints when its fit was interrupted."""

from __future__ import annotations

import contextlib
import sys


def report(line: str) -> None:
    """Prints a line to stderr, even with progress switched off; does nothing if stderr is gone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed file
            print(line, file=sys.stderr, flush=True)
