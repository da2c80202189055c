"""Bytes of regular files, unpacked if the file's name says so, and never more than a limit."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any

from bilevax.data.errors import DataError, decoding_errors, file_errors

SIZE_LIMIT = 4 << 30  # bytes of one unpacked file; the largest known set has some 2.5 GB
LINE_LIMIT = 1 << 24  # bytes; a longer line is no data, and would fill the memory

UNPACKERS: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}


def user_path(path: str | PathLike[str]) -> Path:
    """A path, in which a leading `~` stands for the home folder.

    Raises:
      DataError: the home folder is not known.
    """
    with file_errors("found", path):
        return Path(fspath(path)).expanduser()


@contextmanager
def open_regular(path: str | PathLike[str]) -> Iterator[BufferedReader]:
    """A regular file, open for reading as it is.

    Raises:
      DataError: the file cannot be opened, or it is a folder, a pipe, a socket or a device. Pipes and devices
        may never end, and opening one may wait for ever.
    """
    place = user_path(path)
    with file_errors("opened", place):
        _check_regular(os.stat(place), place)
        # It may have been replaced since: a pipe opens at once without blocking, and is rejected then.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(place, flags)
    with os.fdopen(handle, "rb") as stream:
        _check_regular(os.fstat(stream.fileno()), place)
        yield stream


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise DataError(f"is {kind}, expected a file", path=path)


@contextmanager
def open_bytes(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """A regular file, open for reading; it is unpacked if its name ends in .bz2, .gz or .xz.

    Raises:
      DataError: as `open_regular`.
    """
    with open_regular(path) as file:
        unpack = UNPACKERS.get(Path(path).suffix.lower())
        if unpack is None:
            yield file
            return
        with unpack(file, "rb") as stream:
            yield stream


def read_pieces(
    stream: IO[bytes], path: str | PathLike[str], *, size_limit: int = SIZE_LIMIT, piece: int = 1 << 24
) -> Iterator[bytes]:
    """The bytes of an open file, piece by piece.

    Args:
      stream: what `open_bytes` or an archive yields.
      path: the file that errors name.
      size_limit: most bytes to read; this is what stops a decompression bomb.
      piece: bytes per piece.

    Raises:
      DataError: there are more than `size_limit` bytes, or a packed file is damaged.
    """
    total = 0
    while True:
        with decoding_errors("cannot be read, it is damaged or cut off", path):
            data = stream.read(piece)
        if not data:
            return
        total += len(data)
        if total > size_limit:
            raise DataError(f"holds more than the limit of {size_limit:,} bytes", path=path)
        yield data


def read_whole_lines(
    stream: IO[bytes],
    path: str | PathLike[str],
    *,
    size_limit: int = SIZE_LIMIT,
    line_limit: int = LINE_LIMIT,
    piece: int = 1 << 24,
) -> Iterator[tuple[int, bytes]]:
    """Pieces of a text file that end where lines end, each with the number of its first line.

    Every piece ends with a newline; one is added to a last line that has none.

    Raises:
      DataError: as `read_pieces`, and for a line of more than `line_limit` bytes.
    """
    number, held = 1, b""
    for data in read_pieces(stream, path, size_limit=size_limit, piece=piece):
        end = data.rfind(b"\n") + 1
        whole = held + data[:end] if end else b""
        held = data[end:] if end else held + data
        _check_line_lengths(whole, number, path, line_limit)
        if len(held) > line_limit:
            raise _long_line(path, number + whole.count(b"\n"), line_limit)
        if whole:
            yield number, whole
            number += whole.count(b"\n")
    if held:
        yield number, held + b"\n"


def _check_line_lengths(whole: bytes, number: int, path: str | PathLike[str], line_limit: int) -> None:
    if len(whole) <= line_limit:
        return
    for i, line in enumerate(whole.split(b"\n")):
        if len(line) > line_limit:
            raise _long_line(path, number + i, line_limit)


def _long_line(path: str | PathLike[str], line: int, line_limit: int) -> DataError:
    return DataError(f"is longer than the limit of {line_limit:,} bytes for a line", path=path, line=line)
