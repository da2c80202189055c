"""The one error that reading data raises: what is wrong, in which file, on which line."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import PurePath


class DataError(ValueError):
    """A file, an archive or a download that is not what it should be.

    Args:
      problem: what was found, and what was expected.
      path: the file, of which the message shows the name.
      line: the line of that file, counted from 1.

    Example:
      >>> from bilevax.data import DataError
      >>> print(DataError("expected a number, got 'x'", path="files/a8a", line=17))
      a8a, line 17: expected a number, got 'x'
    """

    def __init__(self, problem: str, *, path: str | PathLike[str] | None = None, line: int | None = None):
        self.problem = problem
        self.path = None if path is None else fspath(path)
        self.line = line
        where = [] if self.path is None else [PurePath(self.path).name or self.path]
        where += [] if line is None else [f"line {line}"]
        super().__init__(f"{', '.join(where)}: {problem}" if where else problem)


def excerpt(text: bytes, length: int = 40) -> str:
    """The beginning of a piece of a file, safe to print whatever it holds."""
    shown = ascii(text[:length].decode("latin-1"))
    return shown if len(text) <= length else f"{shown} and {len(text) - length} bytes more"
