"""Bytes of a file, unpacked where its name says that it is packed, and never more than was asked for."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any

from bilevax.data.errors import DataError

SIZE_LIMIT = 4 << 30  # bytes of one unpacked file; the largest known set has some 2.5 GB
LINE_LIMIT = 1 << 24  # bytes; a longer line is no data, and would fill the memory

_OPENERS: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
_DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error)


@contextmanager
def open_bytes(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """A file open for reading, unpacked if its name ends in .bz2, .gz or .xz.

    Raises:
      DataError: the file cannot be opened.
    """
    place = Path(fspath(path))
    try:
        if place.is_dir():
            raise DataError("is a folder, expected a file", path=place)
        opened = _OPENERS.get(place.suffix.lower(), open)(place, "rb")
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot be opened: {reason} ({place})", path=place) from error
    with opened:
        yield opened


def read_pieces(
    stream: IO[bytes], path: str | PathLike[str], *, size_limit: int = SIZE_LIMIT, piece: int = 1 << 24
) -> Iterator[bytes]:
    """The bytes of an open file, piece by piece.

    Args:
      stream: what `open_bytes` or an archive gives.
      path: the file that errors name.
      size_limit: bytes after which reading is given up; it is what stops a packed bomb.
      piece: bytes per piece.

    Raises:
      DataError: more than `size_limit` bytes, or a packed file that is damaged.
    """
    total = 0
    while True:
        try:
            data = stream.read(piece)
        except _DAMAGE as error:
            raise DataError(f"cannot be read, it is damaged or cut off: {error}", path=path) from error
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

    Every piece ends with a newline, which is added to a last line that has none.

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
