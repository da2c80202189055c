"""One run per directory, by a lock that ends with the process."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from bilevax._run.checkpoint import CheckpointError

_NAME = ".lock"
_held: set[tuple[int, str]] = set()  # (process, directory): a POSIX lock does not exclude its own process
_guard = threading.Lock()


class DirectoryLock:
    """An exclusive lock of a directory.

    It is a POSIX record lock: the kernel releases it when the process ends, and a forked child does not
    inherit it. The lock file names the process that holds it.

    Raises:
      CheckpointError: if another run holds it.
      OSError: if the lock file cannot be written.
    """

    def __init__(self, directory: Path):
        import fcntl

        self._key = (os.getpid(), os.path.realpath(directory))
        with _guard:
            if self._key in _held:
                raise CheckpointError(f"{directory} is in use by another run of this process")
            handle = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.read(handle, 100).decode("ascii", "replace").strip()
                os.close(handle)
                raise CheckpointError(
                    f"{directory} is in use by another run{f', process {holder}' if holder else ''} (it "
                    f"holds {_NAME})"
                ) from error
            _held.add(self._key)
        self._handle: int | None = handle
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Releases the lock; does nothing in a forked child, which never held it."""
        if self._handle is None or self._key[0] != os.getpid():
            return
        with _guard:
            os.close(self._handle)
            self._handle = None
            _held.discard(self._key)
