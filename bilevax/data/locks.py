"""A lock between processes, which ends with the process that holds it and leaves no file behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file stands for; wait while another process holds it.

    Args:
      path: the file, which exists only while the lock is held or waited for.
    """
    handle = _acquire(path)
    try:
        yield
    finally:
        # Removed before it is released: whoever waits for it notices, and starts anew.
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path) -> int:
    import fcntl

    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_same(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
