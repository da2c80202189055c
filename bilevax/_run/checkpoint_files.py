"""The files of checkpoints: their names, their metadata, and what the operating system says about them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

_PREFIX = "step"  # of the names of checkpoints: other folders are not touched
_UNFINISHED = ".orbax-checkpoint-tmp"  # what the writer appends to the name while it writes


def path_of(directory: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return directory / f"{_PREFIX}_{step}"


def steps_in(directory: Path) -> list[int]:
    """The steps of the finished checkpoints in a directory, in order.

    Raises:
      OSError: if the directory cannot be listed. It may hold checkpoints then.
    """
    found = [_step_of(path.name) for path in directory.iterdir()]
    return sorted(step for step in found if step is not None)


def _step_of(name: str) -> int | None:
    """The step of the checkpoint of that name; None if it is no checkpoint's name."""
    found = re.fullmatch(rf"{_PREFIX}_(0|[1-9][0-9]{{0,18}})", name)
    return None if found is None else int(found[1])


# --- metadata ------------------------------------------------------------------


def sealed(meta: dict[str, Any]) -> dict[str, Any]:
    """The metadata with a checksum of all of it."""
    return meta | {"checksum": _digest(meta)}


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if it is not what was written.
    """
    file = checkpoint / "meta" / "metadata"
    require_files(file.parent)
    meta = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(meta, dict) or meta.pop("checksum", None) != _digest(meta):
        raise ValueError("the checksum of its metadata does not match")
    return meta


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


# --- durability ----------------------------------------------------------------


def sync(checkpoint: Path) -> None:
    """Returns when a checkpoint and its name would survive a power failure."""
    for path in (*checkpoint.rglob("*"), checkpoint, checkpoint.parent):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync this
                raise
        finally:
            os.close(handle)


def delete(checkpoint: Path) -> None:
    """Deletes a checkpoint. It loses its name first, so that none is found with files missing."""
    gone = checkpoint.with_name(f"{checkpoint.name}{_UNFINISHED}")
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def delete_unfinished(directory: Path) -> None:
    """Removes what a run was writing or deleting when it was killed."""
    for path in directory.glob(f"{_PREFIX}_*{_UNFINISHED}*"):
        if _step_of(path.name.split(_UNFINISHED)[0]) is not None and not path.is_symlink():
            shutil.rmtree(path)


def set_aside(checkpoint: Path) -> None:
    """Renames a damaged checkpoint: it is in the way of a new one, but nothing is deleted."""
    first = checkpoint.with_name(f"damaged_{checkpoint.name}")
    names = itertools.chain([first], (first.with_name(f"{first.name}_{n}") for n in itertools.count(2)))
    checkpoint.rename(next(name for name in names if not os.path.lexists(name)))


# --- damage --------------------------------------------------------------------

# What a damaged checkpoint may look like to the operating system; other errors say nothing about the files.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
# How the library that reads arrays writes them in messages, in its older and newer versions.
_OS_ERROR = re.compile(r"(?:OS error |os_error_code=')(\d+)")
# What that library and devices say if they cannot do something now.
_LATER = re.compile(r"\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED|ABORTED)\b")


def may_pass(error: BaseException) -> bool:
    """Whether a read failed for a reason that says nothing about the file: it may work the next time."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    codes = [one.errno for one in chain if isinstance(one, OSError) and one.errno is not None]
    codes += [int(code) for one in chain for code in _OS_ERROR.findall(str(one))]
    later = any(isinstance(one, MemoryError) or _LATER.search(str(one)) for one in chain)
    return later or any(code not in _DAMAGE for code in codes)


def require_files(folder: Path) -> None:
    """Raises if a folder holds anything but files and folders: a read would wait for a pipe."""
    for path in (folder, *folder.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a file")
