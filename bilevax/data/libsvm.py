"""Files in LIBSVM's format, read strictly: `label index:value index:value …`, one row per line."""

from __future__ import annotations

import re
from os import PathLike
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from bilevax.data.arguments import whole_number
from bilevax.data.errors import DataError, excerpt
from bilevax.data.files import LINE_LIMIT, SIZE_LIMIT, open_bytes, read_whole_lines

# Possessive quantifiers: the matcher never backtracks, whatever the input.
_NUMBER = rb"[+-]?+(?>[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+"
_LINE = re.compile(rb"%b(?:[ \t]++[0-9]{1,10}+:%b)*+[ \t\r]*+" % (_NUMBER, _NUMBER))
_ONE_NUMBER = re.compile(_NUMBER)
_INDEX_LIMIT = 2**31 - 1  # indices are stored in 32 bits


class _Rows(NamedTuple):
    """Some rows in compressed form; `lengths` counts the entries of each."""

    labels: np.ndarray
    lengths: np.ndarray
    indices: np.ndarray
    values: np.ndarray


def read_libsvm(
    path: str | PathLike[str],
    *,
    width: int | None = None,
    line_limit: int = LINE_LIMIT,
    size_limit: int = SIZE_LIMIT,
) -> tuple[csr_matrix, np.ndarray]:
    """Rows and labels of a file in LIBSVM's format.

    Every line is `label index:value …` with indices that start at 1 and increase. Lines may end in blanks,
    the last newline may be missing, and blank lines may follow the last row. Nothing else is accepted: no
    comments, no `qid:`, no label lists, no nan or infinity.

    Args:
      path: the file; .bz2, .gz and .xz are unpacked.
      width: number of features, below 2³¹. By default the highest index that occurs, which may be less than
        what the data set declares: always pass it for a part of a data set.
      line_limit: most bytes of a line.
      size_limit: most bytes of the unpacked file.

    Returns:
      The rows, a float32 `scipy.sparse.csr_matrix` of shape (rows, width), and the labels: int64 if all are
      whole numbers, else float64.

    Raises:
      DataError: the file is empty, binary, damaged, too large or of another format; a line is truncated or
        too long; an index is 0, not increasing or beyond `width`; a number is not finite.
      ValueError: width is not such a number.

    Example:
      >>> from pathlib import Path
      >>> from tempfile import TemporaryDirectory
      >>> from bilevax.data import read_libsvm
      >>> with TemporaryDirectory() as folder:
      ...     path = Path(folder, "rows")
      ...     _ = path.write_text("-1 1:0.5 3:2\\n+1 2:1\\n")
      ...     rows, labels = read_libsvm(path, width=4)
      >>> rows.shape, labels.tolist()
      ((2, 4), [-1, 1])
    """
    limit = _INDEX_LIMIT if width is None else whole_number("width", width, 1, _INDEX_LIMIT)
    parts: list[_Rows] = []
    ended = False
    with open_bytes(path) as stream:
        pieces = read_whole_lines(stream, path, size_limit=size_limit, line_limit=line_limit, piece=1 << 20)
        for first, piece in pieces:
            filled = piece.rstrip()
            if ended and filled:
                raise DataError("follows a blank line, expected the end of the file", path=path, line=first)
            ended = ended or piece.count(b"\n", len(filled)) > bool(filled)
            if filled:
                parts.append(_parse(filled, first, limit, path))
    if not parts:
        raise DataError("is empty, expected at least one row", path=path)
    labels, lengths, indices, values = map(np.concatenate, zip(*parts, strict=True))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if width is None:
        limit = int(indices.max()) + 1 if len(indices) else 1
    rows = csr_matrix((values, indices, offsets), shape=(len(labels), limit))
    whole = np.all(labels == np.floor(labels)) and np.all(np.abs(labels) < 2**53)
    return rows, labels.astype(np.int64) if whole else labels


def _parse(text: bytes, first: int, limit: int, path: str | PathLike[str]) -> _Rows:
    """The rows of a piece of text that starts at line `first` and has no blank lines at its end."""
    lines = text.split(b"\n")
    for i, line in enumerate(lines):
        if not _LINE.fullmatch(line):
            raise DataError(_complaint(line), path=path, line=first + i)
    lengths = np.fromiter((line.count(b":") for line in lines), np.int64, len(lines))
    words = text.replace(b":", b" ").split()
    numbers = np.fromiter(map(float, words), np.float64, len(words))
    at_label = np.cumsum(1 + 2 * lengths) - (1 + 2 * lengths)
    feature = np.ones(len(numbers), bool)
    feature[at_label] = False
    labels, pairs = numbers[at_label], numbers[feature].reshape(-1, 2)
    row = np.repeat(np.arange(len(lines)), lengths)
    with np.errstate(over="ignore"):
        values = pairs[:, 1].astype(np.float32)

    def reject(bad: np.ndarray, where: np.ndarray | None, problem: str) -> None:
        if bad.any():
            i = int(np.argmax(bad))
            at = i if where is None else int(where[i])
            shown = {} if where is None else {"index": f"{pairs[i, 0]:.0f}", "value": f"{pairs[i, 1]:g}"}
            raise DataError(problem.format(**shown), path=path, line=first + at)

    reject(~np.isfinite(labels), None, "the label is too large for a float64")
    reject(~np.isfinite(values), row, "the value {value} of index {index} is too large for a float32")
    reject(pairs[:, 0] < 1, row, "got index {index}, expected indices from 1")
    reject(pairs[:, 0] > limit, row, f"got index {{index}}, expected at most {limit}")
    falls = np.zeros(len(pairs), bool)
    falls[1:] = (np.diff(pairs[:, 0]) <= 0) & (row[1:] == row[:-1])
    reject(falls, row, "index {index} is not above the one before it, expected increasing indices")
    return _Rows(labels, lengths, (pairs[:, 0] - 1).astype(np.int32), values)


def _complaint(line: bytes) -> str:
    """What is wrong with a line that does not have the format."""
    if line[:1] in (b"\x1f", b"\xfd") or line[:3] == b"BZh" or line[:4] == b"PK\x03\x04":
        return "is packed data, expected text (or a name that ends in .bz2, .gz or .xz)"
    if any(byte < 9 or byte > 126 or 13 < byte < 32 for byte in line[:1000]):
        return f"is not plain text, got {excerpt(line)}"
    words = line.split()
    if not words:
        return "is blank, expected 'label index:value …'"
    if line[:1] in b" \t":
        return "starts with a blank, expected a label"
    if not _ONE_NUMBER.fullmatch(words[0]):
        return f"expected a number as label, got {excerpt(words[0])}"
    for word in words[1:]:
        index, colon, value = word.partition(b":")
        if index == b"qid":
            return "has a qid, which is LIBSVM's format for ranking; expected 'label index:value …'"
        if not colon or not value:
            return f"expected index:value, got {excerpt(word)} (a truncated line, or another format?)"
        if not index.isdigit() or len(index) > 10:
            return f"expected a whole number from 1 to {_INDEX_LIMIT} as index, got {excerpt(index)}"
        if not _ONE_NUMBER.fullmatch(value):
            return f"expected a finite number after {index.decode()}:, got {excerpt(value)}"
    return f"expected 'label index:value …' separated by blanks, got {excerpt(line)}"
