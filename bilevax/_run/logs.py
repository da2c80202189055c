"""Where the entries of a history go while a run goes on: JSON lines, TensorBoard, or your own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bilevax._util import extras

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

    A new run replaces the file. A resumed run replaces it by its entries so far, because lines beyond the
    checkpoint will be written again. A symbolic link is followed; a pipe or a device is appended to.

    Args:
      path: the file; its folder is made if missing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self._file: Any = None

    def start(self, entries: Sequence[Entry]) -> None:
        target = self.path.resolve()
        if target.exists() and not target.is_file():
            self._file = _opened_stream(target)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written apart and then renamed: on a full disk the old file stays.
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        handle, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write("".join(map(_line, entries)))
            os.chmod(fresh, mode)
            os.replace(fresh, target)
        except BaseException:
            os.unlink(fresh)
            raise
        self._file = target.open("a", encoding="utf-8")

    def write(self, entry: Entry) -> None:
        """Appends a line; values that JSON cannot express are written as null."""
        self._file.write(_line(entry))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Every metric as a scalar for TensorBoard.

    Every entry is in the file before the run continues. A resumed run writes all its entries again, and tells
    TensorBoard to forget what earlier files hold.

    Args:
      folder: the folder that `tensorboard --logdir` is given.

    Example:
      >>> import bilevax as bx
      >>> log = bx.TensorBoard("runs/first")  # for bx.minimize(…, log=log)
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self._file: Any = None

    def start(self, entries: Sequence[Entry]) -> None:
        # The package's own SummaryWriter hands events to a thread, which loses them when the process is
        # killed, and waits for ever once a full disk has ended the thread; its other writers sync the disk
        # for every entry.
        events = _tensorboard("proto.event_pb2")
        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9}"
        self._file = (self.folder / name).open("xb")
        begin = events.SessionLog(status=events.SessionLog.START)
        self._add(file_version="brain.Event:2")
        self._add(step=0, session_log=begin)
        for entry in entries:
            self._add_entry(entry)
        self._file.flush()

    def write(self, entry: Entry) -> None:
        self._add_entry(entry)
        self._file.flush()

    def _add_entry(self, entry: Entry) -> None:
        summary = _tensorboard("summary")
        for name, value in entry.items():
            if name != "step":
                self._add(step=int(entry["step"]), summary=summary.scalar(name, value))

    def _add(self, **event: Any) -> None:
        """Adds a record: the length of the event, its checksum, the event, its checksum."""
        checksum = _tensorboard("record_writer").masked_crc32c
        content = _tensorboard("proto.event_pb2").Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(content))
        parts = (length, struct.pack("<I", checksum(length)), content, struct.pack("<I", checksum(content)))
        self._file.write(b"".join(parts))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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

    def restart(self, entries: Sequence[Entry]) -> None:
        """Begins again with these entries: a run went back."""
        for log in self.logs:
            log.close()
            log.start(entries)

    def close(self) -> None:
        """Closes every log once, also if one of them fails."""
        closing, self.logs = self.logs, []
        with contextlib.ExitStack() as stack:
            for log in closing:
                stack.callback(log.close)


def _tensorboard(module: str) -> Any:
    return extras.required(f"tensorboardX.{module}", "TensorBoard", "tensorboard")


def _line(entry: Entry) -> str:
    clean = {name: value if np.isfinite(value) else None for name, value in entry.items()}
    return json.dumps(clean) + "\n"


def _opened_stream(path: Path) -> Any:
    """A pipe or a device, opened for appending without waiting for a reader."""
    if path.is_dir():
        raise IsADirectoryError(f"log must be a file, got the folder {path}")
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, f"log: {path} cannot be written, {error.strerror}") from error
    os.set_blocking(handle, True)
    return os.fdopen(handle, "a", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _as_log(given: Any) -> Log:
    if isinstance(given, (str, Path)):
        return JsonLines(given)
    if isinstance(given, Log) and not isinstance(given, type):
        return given
    raise TypeError(
        "log must be a path, an object with start, write and close such as TensorBoard(folder), or a list of "
        f"them, got {given!r}"
    )
