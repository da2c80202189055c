"""Where a run is saved, and how often."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bilevax._util import checks


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read, or used for this run.

    Attributes:
      result: what the run had reached when a write failed; None if it had not begun.
    """

    result: Any = None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a run is saved, and how often.

    Checkpoints are written in the background. One is written at the end in any case.

    Args:
      directory: a directory for this run alone; made if missing.
      steps: steps between checkpoints.
      seconds: seconds between checkpoints.
      keep: how many of the latest checkpoints are kept.
      resume: continue from the latest checkpoint, if there is one. The run ends with the same bits as one
        that was never stopped.

    Example:
      >>> import bilevax as bx
      >>> checkpoint = bx.Checkpoint("runs/first", steps=10_000, resume=True)
    """

    directory: str | Path
    steps: int | None = None
    seconds: float | None = 300.0
    keep: int = 3
    resume: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, Path)):
            got = type(self.directory).__name__
            raise TypeError(f"checkpoint must be a directory or a bilevax.Checkpoint, got {got}")
        object.__setattr__(self, "directory", Path(self.directory).expanduser())
        if self.steps is not None:
            checks.whole_number("steps between checkpoints", self.steps, 1)
        if self.seconds is not None:
            checks.number("seconds between checkpoints", self.seconds, 0.0, zero=False)
        checks.whole_number("keep", self.keep, 1)
        if not isinstance(self.resume, bool):
            raise TypeError(f"resume must be True or False, got {self.resume!r}")


def as_checkpoint(given: str | Path | Checkpoint) -> Checkpoint:
    """What the user gave, as an object."""
    return given if isinstance(given, Checkpoint) else Checkpoint(given)
