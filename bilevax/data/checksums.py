"""Checksums of files: of their bytes, and of a text whatever its line ends."""

from __future__ import annotations

import hashlib
from os import PathLike

from bilevax.data.errors import DataError
from bilevax.data.files import SIZE_LIMIT, open_bytes, read_pieces


def digest(path: str | PathLike[str], algorithm: str = "sha256") -> str:
    """The checksum of a file's bytes as they lie on disk.

    Example:
      >>> import tempfile, pathlib
      >>> from bilevax.data.checksums import digest
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "empty")
      ...     path.touch()
      ...     digest(path, "md5")
      'd41d8cd98f00b204e9800998ecf8427e'
    """
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, algorithm).hexdigest()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=path) from error


def text_sha256(path: str | PathLike[str], *, size_limit: int = SIZE_LIMIT) -> str:
    r"""The SHA-256 of a text's lines, without blanks at their ends and without blank lines at the end.

    Copies of LIBSVM's files differ in line ends (`\r\n`, blanks, a last newline) and in nothing else. The sum
    is of every line stripped of white space at its right, joined by `\n`, less the white space at the end.

    Example:
      >>> import tempfile, pathlib
      >>> from bilevax.data.checksums import text_sha256
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     one, other = pathlib.Path(folder, "one"), pathlib.Path(folder, "other")
      ...     _ = one.write_bytes(b"-1 3:1 \r\n+1 4:1"), other.write_bytes(b"-1 3:1\n+1 4:1\n\n")
      ...     text_sha256(one) == text_sha256(other)
      True
    """
    with open_bytes(path) as stream:
        text = b"".join(read_pieces(stream, path, size_limit=size_limit))
    lines = [line.rstrip() for line in text.rstrip().split(b"\n")]
    return hashlib.sha256(b"\n".join(lines)).hexdigest()
