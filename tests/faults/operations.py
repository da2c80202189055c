"""Faults at a file operation: whatever a run does to its folder, the n-th thing it does goes wrong."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import shutil
import signal
import sys
import threading

from faults.runs import (
    REFUSED,
    RESUMED,
    Attempt,
    ViolationError,
    copy_of_stopped_run,
    nothing_moved,
    require_resumed,
    require_same,
    settle,
)

CODES = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ESTALE, errno.EDQUOT)


class Operations:
    """While entered, calls `act` at the n-th operation (open, rename, mkdir, list, …) below a folder.

    Python reports these operations to its audit hooks. Those of the compiled library that writes the arrays
    are not seen; limits and a small disk are faults for them.
    """

    active = None

    def __init__(self, folder, number, act):
        self.folder, self.number, self.act, self.count = str(folder), number, act, 0
        self.lock = threading.Lock()

    def __enter__(self):
        _install_hook()
        Operations.active = self
        return self

    def __exit__(self, *error):
        Operations.active = None

    def see(self, arguments):
        if not any(isinstance(one, str) and one.startswith(self.folder) for one in map(_text, arguments)):
            return
        with self.lock:
            self.count += 1
            due = self.count == self.number
        if due:
            self.act()


def _text(argument):
    try:
        return os.fsdecode(argument)
    except TypeError:
        return None


@functools.cache
def _install_hook():
    """A hook stays for as long as the process."""

    def hook(event, arguments):
        if Operations.active is not None and event.split(".")[0] in ("open", "os", "shutil"):
            Operations.active.see(arguments)

    sys.addaudithook(hook)


@functools.cache
def how_many():
    """The operations of a run that resumes."""
    with copy_of_stopped_run() as folder, Operations(folder, 0, None) as seen:
        Attempt(folder)
        return seen.count


def _place(number):
    """Every operation in turn, in an order that spreads a few faults over the whole run."""
    return 1 + (number * 37) % how_many()


def error(rng, number):
    """EIO, ENOSPC, EACCES, …"""
    code = CODES[rng.integers(len(CODES))]

    def fail():
        raise OSError(code, os.strerror(code))

    with copy_of_stopped_run() as folder:
        with nothing_moved(folder), Operations(folder, _place(number), fail):
            attempt = Attempt(folder)
        require_resumed(attempt)
        settle(folder, may_refuse=False, may_warn=False)
    return RESUMED if attempt.finished else REFUSED


def lost_folder(rng, number):
    """The folder is removed, moved away or replaced while the run is using it."""
    with copy_of_stopped_run() as folder:
        moved = folder.with_name("moved")
        way = ("removed", "moved", "replaced")[rng.integers(3)]

        def lose():
            Operations.active = None
            folder.rename(moved)
            if way == "replaced":
                shutil.copytree(moved, folder)

        with Operations(folder, _place(number), lose):
            attempt = Attempt(folder)
        if attempt.finished:  # from the start, if the folder was lost before it was read
            require_same(attempt.result)
        elif attempt.error is None:
            raise ViolationError("the run did not finish, and gave no reason")
        for place in (folder, moved):
            if place.exists():
                settle(place, may_refuse=False)
    return RESUMED if attempt.finished else REFUSED


def stop(rng, number):
    """SIGINT or SIGTERM; before and after the loop, where a run does not catch them, they are ignored."""
    which = (signal.SIGINT, signal.SIGTERM)[rng.integers(2)]
    before = signal.signal(which, lambda *_: None)
    try:
        with copy_of_stopped_run() as folder:
            with Operations(folder, _place(number), lambda: os.kill(os.getpid(), which)):
                attempt = Attempt(folder)
            if attempt.error is not None:
                raise ViolationError(f"a signal is no error: {attempt.error}")
            require_resumed(attempt)
            return settle(folder, may_refuse=False, may_warn=False)
    finally:
        signal.signal(which, before)


@contextlib.contextmanager
def _limited(kind, value):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def _few_files(more):
    """So many more files may be open."""
    highest, opened = max(map(int, os.listdir("/proc/self/fd"))), [-1]
    while opened[-1] <= highest:  # no number below the limit is free
        opened.append(os.open(os.devnull, os.O_RDONLY))
    try:
        with _limited(resource.RLIMIT_NOFILE, opened[-1] + 1 + more):
            yield
    finally:
        for one in opened[1:]:
            os.close(one)


def limit(rng, number):
    """Files may not grow beyond a few bytes, or no more files may be opened: in compiled code too."""
    how_many()  # all that is loaded once is loaded
    with copy_of_stopped_run() as folder:
        if number % 2:
            limited = _limited(resource.RLIMIT_FSIZE, int(rng.integers(0, 400_000)))
        else:
            limited = _few_files(int(rng.integers(0, 12)))
        with nothing_moved(folder), limited:
            attempt = Attempt(folder)
        require_resumed(attempt)
        settle(folder, may_refuse=False, may_warn=False)
    return RESUMED if attempt.finished else REFUSED


def full_disk(rng, number):
    """A disk with room for a part of a checkpoint. For a process whose temporary folder is a small disk."""
    with copy_of_stopped_run() as folder:
        filler = folder.with_name("filler")
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        filler.write_bytes(bytes(max(0, free - int(rng.integers(0, 1_200_000)))))
        with nothing_moved(folder):
            attempt = Attempt(folder)
        require_resumed(attempt)
        filler.unlink()
        settle(folder, may_refuse=False, may_warn=False)
    return RESUMED if attempt.finished else REFUSED
