"""How a run ended."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Why `minimize` returned; prints as a readable word or two."""

    FINISHED = "finished"
    CONVERGED = "converged"
    TIME = "stopped by time"
    PATIENCE = "stopped by patience"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"


class DivergedError(FloatingPointError):
    """Raised by `minimize` when a quantity is no longer finite; `result` holds what there is."""

    def __init__(self, message: str, result: object):
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[type[DivergedError], tuple[str, object]]:
        """Both arguments, for pickling: an exception crosses the border of a process that way."""
        return DivergedError, (str(self), self.result)
