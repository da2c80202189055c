"""SIGINT and SIGTERM as a wish to stop soon, and the line that says so."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, the first SIGINT or SIGTERM is noted; the second stops the program at once.

    Outside the main thread, where Python allows no handlers, it notes nothing and signals act as ever.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught = signal.Signals(number)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def describe(self, done: int, steps: int, directory: str | Path | None, *, raised: bool) -> str:
        """What happened and how to continue, in one line.

        Args:
          done: the steps taken.
          steps: the steps of the whole run.
          directory: of the checkpoints; None if there are none.
          raised: whether an error says it; else `minimize` returns.
        """
        by = "" if self.caught is None else f" by {self.caught.name}"  # another process may have caught it
        if directory is not None:
            resume = f"checkpoint=bx.Checkpoint({str(directory)!r}, resume=True) continues it"
        else:
            resume = "bx.advance continues from the result's state"
        held = "this error's `result` holds the run so far" if raised else "it returns the run so far"
        other = "" if raised else "; bx.Stop(raise_on_interrupt=True) would raise"
        return f"bilevax.minimize was interrupted{by} at step {done} of {steps}: {held}; {resume}{other}"


def report(line: str) -> None:
    """Prints a line to stderr; does nothing if stderr is gone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed file
            print(line, file=sys.stderr, flush=True)
