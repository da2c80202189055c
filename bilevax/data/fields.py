"""Columns of unsigned numbers in delimited text: a strict parser that takes all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal

import numpy as np

from bilevax.data.errors import DataError, excerpt

Kind = Literal["whole", "decimal"]
_DIGITS = 18  # of the longest number: it fits into 64 bits
_ZERO, _DOT = ord("0"), ord(".")


def parse_fields(
    text: bytes,
    separators: bytes,
    kinds: Sequence[Kind],
    names: Sequence[str],
    lines: np.ndarray,
    path: str | PathLike[str],
) -> list[np.ndarray]:
    r"""The columns of a piece of text that has the same fields in every line.

    A whole number consists of digits; a decimal may have one dot. Signs, exponents and blanks are rejected.

    Args:
      text: whole lines, each of which ends in `\n`.
      separators: the byte after each field but the last.
      kinds: the kind of each field: "whole" becomes int64, "decimal" float64.
      names: the names of the fields in errors.
      lines: the number of each line in its file.
      path: the file that errors name.

    Raises:
      DataError: a line has other fields, or a field is not such a number.

    Example:
      >>> import numpy as np
      >>> from bilevax.data.fields import parse_fields
      >>> parse_fields(b"1,4.5\n12,3\n", b",", ["whole", "decimal"], ["user", "rating"], np.array([1, 2]), "")
      [array([ 1, 12]), array([4.5, 3. ])]
    """
    buffer = np.frombuffer(text, np.uint8)
    breaks = buffer == ord("\n")
    for separator in set(separators):
        breaks |= buffer == separator
    ends = np.flatnonzero(breaks)
    width = len(kinds)
    expected = np.frombuffer(separators + b"\n", np.uint8)
    # Compared as if every line had the right number of fields: the first line that does not is found.
    whole = len(ends) // width
    wrong = (buffer[ends[: whole * width]].reshape(-1, width) != expected).any(axis=1)
    if wrong.any() or whole * width != len(ends):
        row = int(np.argmax(wrong)) if wrong.any() else whole
        shown = " ".join(f"{name} {chr(mark)}" for name, mark in zip(names, separators, strict=False))
        line = text.split(b"\n", row + 1)[row]
        layout = f"{shown} {names[-1]}".replace("\t", "TAB").replace("\x1f", "::")
        raise DataError(f"expected '{layout}', got {excerpt(line)}", path=path, line=int(lines[row]))
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    columns = []
    for i, kind in enumerate(kinds):
        start, end = starts[i::width], ends[i::width]
        values, bad = _numbers(buffer, start, end - start, kind)
        if bad.any():
            row = int(np.argmax(bad))
            got = excerpt(text[start[row] : end[row]])
            wanted = f"a {kind} number of at most {_DIGITS} digits"
            raise DataError(f"expected {wanted} as {names[i]}, got {got}", path=path, line=int(lines[row]))
        columns.append(values)
    return columns


def _numbers(
    buffer: np.ndarray, start: np.ndarray, length: np.ndarray, kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of one column, and a mask of the fields that are none."""
    longest = _DIGITS if kind == "whole" else _DIGITS + 1
    bad = (length < 1) | (length > longest)
    value = np.zeros(len(start), np.int64)
    digits = np.zeros(len(start), np.int8)
    after = np.full(len(start), -1, np.int8)  # digits after the dot; -1 before there is one
    shortest = int(length.min(initial=longest))
    for place in range(min(int(length.max(initial=0)), longest)):
        byte = buffer.take(start + place, mode="clip")
        digit = byte - np.uint8(_ZERO)
        is_digit = digit <= 9
        if kind == "whole" and place < shortest:  # no number has ended yet: every byte must be a digit
            bad |= ~is_digit
            value *= 10
            value += digit
            continue
        inside = place < length
        is_digit &= inside
        value = np.where(is_digit, value * 10 + digit, value)
        is_dot = inside & (byte == _DOT) & (after < 0) & (kind == "decimal")
        bad |= inside & ~is_digit & ~is_dot
        digits += is_digit
        after += is_dot | (is_digit & (after >= 0))
    if kind == "whole":
        return value, bad
    bad |= (digits == 0) | (digits > _DIGITS)
    return value / 10.0 ** np.maximum(after, 0), bad
