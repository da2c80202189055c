"""SIGINT and SIGTERM as a wish to stop soon."""

from __future__ import annotations

import os
import signal
import threading
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
