"""The one error that reading data raises: what is wrong, in which file, on which line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import PurePath


class DataError(ValueError):
    """A file, an archive or a download is not what it should be.

    Args:
      problem: what was found, and what was expected.
      path: the file; the message shows its name.
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
        where = [] if self.path is None else [printable(PurePath(self.path).name or self.path)]
        where += [] if line is None else [f"line {line}"]
        super().__init__(f"{', '.join(where)}: {problem}" if where else problem)


def printable(text: object, length: int = 200) -> str:
    """The beginning of a text from outside, with control characters escaped: a terminal would obey them."""
    whole = str(text)
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in whole[:length])
    return shown if len(whole) <= length else f"{shown}…"


def excerpt(text: bytes, length: int = 40) -> str:
    """The beginning of a piece of a file, quoted and in ASCII."""
    shown = ascii(text[:length].decode("latin-1"))
    return shown if len(text) <= length else f"{shown} and {len(text) - length} bytes more"


@contextmanager
def file_errors(action: str, path: str | PathLike[str]) -> Iterator[None]:
    """Turn the errors of the file system into `DataError`: "cannot be opened: Permission denied (/data/a8a)".

    `ValueError` is among them for names that no file can have, `RecursionError` for folders nested too deep,
    and `RuntimeError` for a home folder that is not known.
    """
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"cannot be {action}: {_reason(error)} ({printable(fspath(path))})"
        raise DataError(reason, path=path) from error


@contextmanager
def decoding_errors(problem: str, path: str | PathLike[str]) -> Iterator[None]:
    """Turn whatever a decoder raises into `DataError`.

    Decoders are not written for hostile input: damaged files make them raise errors of any kind, and other
    ones in other versions. Wrap nothing but calls of a decoder.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{problem}: {_reason(error)}", path=path) from error


def _reason(error: Exception) -> str:
    return printable(getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__)
