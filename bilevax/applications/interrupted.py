"""What an estimator does when a signal interrupts its fit."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def result_of(interrupt: KeyboardInterrupt) -> Any:
    """What the interrupted run had reached; raises the interrupt again if it came from elsewhere."""
    reached = getattr(interrupt, "result", None)
    if reached is None:
        raise interrupt
    return reached


def end_fit(line: str, *, raises: bool) -> None:
    """Ends an interrupted fit whose model is in place: raises `KeyboardInterrupt`, or prints a line.

    Args:
      line: what happened.
      raises: whether to raise, so that the program around the fit ends too.
    """
    if raises:
        raise KeyboardInterrupt(f"{line}; raise_on_interrupt=False would return it")
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, a closed file
            print(line, file=sys.stderr, flush=True)
