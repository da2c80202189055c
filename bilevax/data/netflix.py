"""The Netflix prize's files: lines `movie:`, each followed by `user,rating,YYYY-MM-DD` lines about it."""

from __future__ import annotations

from os import PathLike
from typing import IO

import numpy as np

from bilevax.data.errors import DataError, excerpt
from bilevax.data.fields import parse_fields
from bilevax.data.files import LINE_LIMIT, SIZE_LIMIT, read_whole_lines
from bilevax.data.interactions import Columns, check_ratings

_NAMES = ("user", "rating", "year", "month", "day")


def read_netflix(
    stream: IO[bytes],
    path: str | PathLike[str],
    *,
    rating_range: tuple[float, float] = (1.0, 5.0),
    size_limit: int = SIZE_LIMIT,
    line_limit: int = LINE_LIMIT,
) -> Columns:
    """The columns of `combined_data_*.txt` or `mv_*.txt`; time is in seconds since 1970.

    Args:
      stream: the file, open for reading.
      path: the file that errors name.
      rating_range: smallest and largest rating.
      size_limit: most bytes to read.
      line_limit: most bytes of a line.

    Raises:
      DataError: a line has another form, a rating precedes the first movie, a date does not exist, or there
        are no ratings.
    """
    parts: list[Columns] = []
    movie: int | None = None
    pieces = read_whole_lines(stream, path, size_limit=size_limit, line_limit=line_limit, piece=1 << 22)
    for first, piece in pieces:
        text = piece.replace(b"\r\n", b"\n")
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        starts = np.concatenate([[0], ends[:-1] + 1])
        heads = _header_lines(text, ends)
        if movie is None and not (len(heads) and heads[0] == 0):
            got = excerpt(text[: ends[0]])
            raise DataError(f"expected 'movie:' before the first rating, got {got}", path=path, line=first)
        movies = [-1 if movie is None else movie]
        movies += [_movie(text[starts[i] : ends[i]], first + int(i), path) for i in heads]
        movie = movies[-1]
        is_head = np.zeros(len(ends), bool)
        is_head[heads] = True
        rest = _without(text, starts[heads], ends[heads] + 1)
        if rest:
            lines = np.flatnonzero(~is_head) + first
            about = np.asarray(movies, np.int64)[np.cumsum(is_head)[~is_head]]
            parts.append(_parse(rest, about, lines, path, rating_range))
    if not parts:
        raise DataError("holds no rating, expected 'movie:' and then 'user,rating,date'", path=path)
    return Columns(*map(np.concatenate, zip(*parts, strict=True)))


def _header_lines(text: bytes, ends: np.ndarray) -> np.ndarray:
    """The indices of the lines that end in a colon."""
    buffer = np.frombuffer(text, np.uint8)
    return np.flatnonzero((ends > 0) & (buffer[np.maximum(ends - 1, 0)] == ord(":")))


def _movie(line: bytes, number: int, path: str | PathLike[str]) -> int:
    digits = line[:-1]
    if not digits.isdigit() or len(digits) > 18:
        raise DataError(f"expected 'movie:' with a whole number, got {excerpt(line)}", path=path, line=number)
    return int(digits)


def _without(text: bytes, starts: np.ndarray, ends: np.ndarray) -> bytes:
    """A text without the spans from each start to its end."""
    kept, at = [], 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        kept.append(text[at:start])
        at = end
    return b"".join([*kept, text[at:]])


def _parse(
    text: bytes,
    movie: np.ndarray,
    lines: np.ndarray,
    path: str | PathLike[str],
    rating_range: tuple[float, float],
) -> Columns:
    kinds = ("whole", "decimal", "whole", "whole", "whole")
    user, rating, year, month, day = parse_fields(text, b",,--", kinds, _NAMES, lines, path)
    check_ratings(rating, rating_range, path, lines)
    bad = (year < 1990) | (year > 2100) | (month < 1) | (month > 12) | (day < 1)
    months = ((np.where(bad, 1990, year) - 1970) * 12 + np.where(bad, 1, month) - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (np.where(bad, 1, day) - 1)
    bad |= (day > 31) | (days.astype("datetime64[M]") != months)
    if bad.any():
        row = int(np.argmax(bad))
        got = f"{year[row]}-{month[row]}-{day[row]}"
        raise DataError(f"expected a date from 1990 to 2100, got {got}", path=path, line=int(lines[row]))
    seconds = days.astype("datetime64[s]").astype(np.int64)
    return Columns(user, movie, rating.astype(np.float32), seconds)
