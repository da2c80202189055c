"""Arrays and a JSON note in one .npz file: no pickle, written whole or not at all, with a checksum.

The comment at the end of the zip archive is the SHA-256 of all bytes before it. So `numpy.load` can read the
file as a plain .npz, and any changed byte is found.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import secrets
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

_NOTE, _FORMAT = "about.json", 2
_MARK = b"bilevax sha256 "
_COMMENT_LENGTH = len(_MARK) + 64
_PIECE = 2**20  # bytes that are hashed at a time


def save_arrays(path: str | Path, note: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes arrays and a note.

    The file is written under a new, random name in the same folder and then renamed. A symbolic link at
    `path` is replaced; its target stays as it is.

    Args:
      path: the file; "~" is the home folder.
      note: what JSON can hold.
      arrays: arrays by name.

    Raises:
      ValueError: `path` is a folder, a device or a pipe.
      OSError: the file cannot be written.
    """
    path = full_path(path)
    if path.exists() and not path.is_symlink() and not path.is_file():
        raise ValueError(f"{path} must be a file or not exist yet, got a folder, a device or a pipe")
    text = json.dumps({"format": _FORMAT, **note})
    columns: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    columns[_NOTE] = np.frombuffer(text.encode(), np.uint8)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    # O_EXCL fails if the name exists, as a file or as a link: nobody else's file is written to.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(part, flags, 0o666)
    try:
        with open(descriptor, "w+b") as file:
            np.savez(file, allow_pickle=False, **columns)
            _append_checksum(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def load_arrays(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads what `save_arrays` wrote.

    Args:
      path: the file; "~" is the home folder.

    Returns:
      The note and the arrays.

    Raises:
      ValueError: the file is of another kind, or was changed after it was written.
      OSError: the file cannot be read.
    """
    content = read_file(path)
    try:
        note, arrays = _parse(content)
    except Exception as error:  # damaged bytes make zipfile, json and NumPy raise nearly anything
        raise ValueError(f"{path} must be a file that save() wrote, got something else: {error}") from error
    if note.get("format") != _FORMAT:
        raise ValueError(f"{path} has the format {note.get('format')!r}, expected {_FORMAT}")
    return note, arrays


def read_file(path: str | Path, limit: int | None = None) -> bytes:
    """The bytes of a file.

    Args:
      path: the file; "~" is the home folder.
      limit: the most bytes that it may have.

    Raises:
      ValueError: `path` is a folder, a device or a pipe, or the file is larger than `limit`.
      OSError: the file cannot be read.
    """
    full = full_path(path)
    status = full.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} must be a file, got a folder, a device or a pipe")
    if limit is not None and status.st_size > limit:
        raise ValueError(f"{path} must have at most {limit:,} bytes, got {status.st_size:,}")
    return full.read_bytes()


def full_path(path: str | Path) -> Path:
    """The path with "~" replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path} must be a path: {error}") from error


def _append_checksum(file: IO[bytes]) -> None:
    """Sets the archive's comment to the checksum of all bytes before it."""
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = bytes(_COMMENT_LENGTH)  # the length is part of what is hashed
    body = file.seek(0, os.SEEK_END) - _COMMENT_LENGTH
    file.seek(0)
    digest = hashlib.sha256()
    for start in range(0, body, _PIECE):
        digest.update(file.read(min(_PIECE, body - start)))
    file.seek(body)
    file.write(_MARK + digest.hexdigest().encode())


def _parse(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    body, comment = content[:-_COMMENT_LENGTH], content[-_COMMENT_LENGTH:]
    if not comment.startswith(_MARK):
        raise ValueError("it does not end with a checksum")
    if comment != _MARK + hashlib.sha256(body).hexdigest().encode():
        raise ValueError("its checksum is wrong: the file is damaged")
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            # Stored members cannot be larger than the file: nothing unpacks to fill the memory.
            if member.compress_type != zipfile.ZIP_STORED or member.filename in arrays:
                raise ValueError(f"its member {member.filename!r} is compressed or occurs twice")
            arrays[member.filename] = _array(archive.read(member))
    arrays = {name.removesuffix(".npy"): array for name, array in arrays.items()}
    if _NOTE not in arrays:
        raise ValueError("it has no note")
    note = json.loads(arrays.pop(_NOTE).tobytes().decode())
    if not isinstance(note, dict):
        raise ValueError(f"its note is not an object but {type(note).__name__}")
    return note, arrays


def _array(data: bytes) -> np.ndarray:
    """An array from the bytes of an .npy file, whose header must agree with their number."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array has a header of another version")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    start = stream.tell()
    if dtype.hasobject or min(shape, default=0) < 0 or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} and {dtype} does not have {len(data) - start} bytes")
    order = "F" if fortran_order else "C"
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order).copy(order)
