"""Where the entries of a history go while a run goes on: JSON lines, TensorBoard, or your own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

Entry = Mapping[str, float]


@runtime_checkable
class Log(Protocol):
    """Something that is told every entry of the history as soon as it is known."""

    def start(self, entries: Sequence[Entry]) -> None:
        """Called before the first step, with the entries that a resumed run begins with."""

    def write(self, entry: Entry) -> None:
        """Called with every new entry: "step", "seconds" and the metrics."""

    def close(self) -> None:
        """Called at the end, however the run ends."""


class JsonLines:
    """A file that gets every entry as one line of JSON.

    A run that starts replaces the file. One that is resumed replaces it by its entries so far: what the file
    held beyond the checkpoint is now repeated, and must not occur twice.

    Args:
      path: the file; its folder is made if missing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: Any = None

    def start(self, entries: Sequence[Entry]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written apart and then renamed: on a full disk the old file stays.
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text("".join(map(_line, entries)), encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, entry: Entry) -> None:
        """Appends a line; numbers that JSON has no word for are written as null."""
        self._file.write(_line(entry))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Every metric as a scalar for TensorBoard.

    Args:
      folder: the folder that `tensorboard --logdir` is given.

    Example:
      >>> import bilevax as bx
      >>> log = bx.TensorBoard("runs/first")  # for bx.minimize(…, log=log)
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._writer: Any = None

    def start(self, entries: Sequence[Entry]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError('TensorBoard needs tensorboardX: pip install "bilevax[tensorboard]"') from error
        # What was written after the checkpoint is hidden: it is computed again.
        later = int(entries[-1]["step"]) + 1 if entries else 0
        self._writer = SummaryWriter(str(self.folder), purge_step=later)

    def write(self, entry: Entry) -> None:
        for name, value in entry.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(entry["step"]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Logs:
    """Several logs as one.

    Args:
      given: None, a path (for JSON lines), a log, or a list of them.

    Raises:
      TypeError: if something is neither a path nor a log.
    """

    def __init__(self, given: str | Path | Log | Sequence[Any] | None):
        several = list(given) if isinstance(given, (list, tuple)) else [given]
        self.logs = [_as_log(one) for one in several if one is not None]

    def start(self, entries: Sequence[Entry]) -> None:
        for log in self.logs:
            log.start(entries)

    def write(self, entry: Entry) -> None:
        for log in self.logs:
            log.write(entry)

    def close(self) -> None:
        for log in self.logs:
            log.close()


def _line(entry: Entry) -> str:
    clean = {name: value if np.isfinite(value) else None for name, value in entry.items()}
    return json.dumps(clean) + "\n"


def _as_log(given: Any) -> Log:
    if isinstance(given, (str, Path)):
        return JsonLines(given)
    if isinstance(given, Log) and not isinstance(given, type):
        return given
    raise TypeError(
        "log must be a path, an object with start, write and close such as TensorBoard(folder), or a list of "
        f"them, got {given!r}"
    )
