"""One run per directory, by a lock that ends with the process."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from bilevax._run.checkpoint import CheckpointError

_NAME = ".lock"


class DirectoryLock:
    """An exclusive lock of a directory.

    The kernel releases it when the process ends. It belongs to the open file: other runs of this process are
    excluded too, and reading the lock file (for a backup, say) does not release it. A forked child closes its
    copy. The lock file names the process that holds it.

    Raises:
      CheckpointError: if another run holds it.
      OSError: if the lock file cannot be written.
    """

    def __init__(self, directory: Path):
        import fcntl

        self._path = directory / _NAME
        # A link is not followed: the name of the process would be written into another file.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self._path, flags, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 100).decode("ascii", "replace").strip()
            os.close(handle)
            who = "another run of this process" if holder == str(os.getpid()) else "another run"
            where = f", process {holder}" if holder and holder != str(os.getpid()) else ""
            raise CheckpointError(f"{directory} is in use by {who}{where} (it holds {_NAME})") from error
        except BaseException:
            os.close(handle)
            raise
        self._handle: int | None = handle
        _open_locks.add(self)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())

    def check(self) -> None:
        """Raises if the directory is no longer the one that was locked: another run may have it.

        Raises:
          CheckpointError: if it was removed or replaced.
        """
        with contextlib.suppress(OSError):
            if self._handle is not None and os.path.samestat(os.fstat(self._handle), os.stat(self._path)):
                return
        raise CheckpointError(f"{self._path.parent} was removed or replaced while a run was using it")

    def release(self) -> None:
        """Releases the lock."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None
        _open_locks.discard(self)


_open_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget() -> None:
    """In a forked child: closes its copies, which would hold the locks when the parent has ended."""
    for lock in list(_open_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
