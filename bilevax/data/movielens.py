"""The rating files of MovieLens: `u.data` (100K), `ratings.dat` (1M, 10M) and `ratings.csv` (20M, 25M)."""

from __future__ import annotations

from os import PathLike
from typing import IO, NamedTuple

import numpy as np

from bilevax.data.errors import DataError, excerpt
from bilevax.data.fields import parse_fields
from bilevax.data.files import LINE_LIMIT, SIZE_LIMIT, read_whole_lines
from bilevax.data.interactions import Columns, check_ratings

_HEADER = b"userId,movieId,rating,timestamp"


class Layout(NamedTuple):
    """What separates the fields of a file, and whether it starts with the header of 20M and 25M."""

    separator: bytes
    header: bool = False


LAYOUTS = {"u.data": Layout(b"\t"), "ratings.dat": Layout(b"::"), "ratings.csv": Layout(b",", header=True)}


def read_movielens(
    stream: IO[bytes],
    layout: Layout,
    path: str | PathLike[str],
    *,
    rating_range: tuple[float, float] = (0.5, 5.0),
    size_limit: int = SIZE_LIMIT,
    line_limit: int = LINE_LIMIT,
) -> Columns:
    """The columns of one of MovieLens' files.

    Args:
      stream: the file, open for reading.
      layout: one of `LAYOUTS`.
      path: the file that errors name.
      rating_range: smallest and largest rating.
      size_limit: most bytes to read.
      line_limit: most bytes of a line.

    Raises:
      DataError: a line is not four numbers, a rating is out of range, or there are no lines.
    """
    parts: list[Columns] = []
    marker, ended = b"\x1f" if layout.separator == b"::" else layout.separator, False
    pieces = read_whole_lines(stream, path, size_limit=size_limit, line_limit=line_limit, piece=1 << 22)
    for first, piece in pieces:
        text = piece.replace(b"\r\n", b"\n")
        if first == 1 and layout.header:
            header, _, text = text.partition(b"\n")
            if header != _HEADER:
                raise DataError(
                    f"expected the header {_HEADER.decode()!r}, got {excerpt(header)}", path=path, line=1
                )
            first = 2
        filled = text.rstrip(b"\n")
        if filled and ended:
            raise DataError("follows a blank line, expected the end of the file", path=path, line=first)
        ended = ended or text.count(b"\n", len(filled)) > bool(filled)
        if filled:
            parts.append(_parse(filled + b"\n", layout.separator, marker, first, path, rating_range))
    if not parts:
        raise DataError("is empty, expected at least one rating", path=path)
    return Columns(*map(np.concatenate, zip(*parts, strict=True)))


def _parse(
    text: bytes,
    separator: bytes,
    marker: bytes,
    first: int,
    path: str | PathLike[str],
    rating_range: tuple[float, float],
) -> Columns:
    if separator != marker:
        if marker in text:
            line = first + text.count(b"\n", 0, text.index(marker))
            raise DataError("holds a control character, expected fields between '::'", path=path, line=line)
        text = text.replace(separator, marker)
    lines = np.arange(first, first + text.count(b"\n"))
    kinds = ("whole", "whole", "decimal", "whole")
    user, item, rating, time = parse_fields(text, marker * 3, kinds, Columns._fields, lines, path)
    check_ratings(rating, rating_range, path, lines)
    return Columns(user, item, rating.astype(np.float32), time)
