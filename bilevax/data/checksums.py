"""Checksums of files: of their bytes, and of a text whatever its line ends."""

from __future__ import annotations

import hashlib
from os import PathLike

from bilevax.data.errors import file_errors
from bilevax.data.files import SIZE_LIMIT, open_bytes, open_regular, read_whole_lines

_NEWLINES = b"\n" * (1 << 16)


def digest(path: str | PathLike[str], algorithm: str = "sha256") -> str:
    """The checksum of a file's bytes as they are on disk.

    Raises:
      DataError: it cannot be read, or is not a regular file.

    Example:
      >>> import tempfile, pathlib
      >>> from bilevax.data.checksums import digest
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "empty")
      ...     path.touch()
      ...     digest(path, "md5")
      'd41d8cd98f00b204e9800998ecf8427e'
    """
    with open_regular(path) as stream, file_errors("read", path):
        return hashlib.file_digest(stream, algorithm).hexdigest()


def text_sha256(path: str | PathLike[str], *, size_limit: int = SIZE_LIMIT) -> str:
    r"""The SHA-256 of a text, without white space at the ends of its lines and at its end.

    Copies of LIBSVM's files differ in line ends (`\r\n`, blanks, a last newline) and in nothing else. The
    checksum is of all lines, stripped of white space on the right and joined by `\n`, without the white space
    at the end of the text.

    Raises:
      DataError: it cannot be read, is too large, or has a line of more than 16 MiB.

    Example:
      >>> import tempfile, pathlib
      >>> from bilevax.data.checksums import text_sha256
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     one, other = pathlib.Path(folder, "one"), pathlib.Path(folder, "other")
      ...     _ = one.write_bytes(b"-1 3:1 \r\n+1 4:1"), other.write_bytes(b"-1 3:1\n+1 4:1\n\n")
      ...     text_sha256(one) == text_sha256(other)
      True
    """
    total, blank = hashlib.sha256(), 0
    with open_bytes(path) as stream:
        for _, piece in read_whole_lines(stream, path, size_limit=size_limit, piece=1 << 20):
            text = b"\n".join(line.rstrip() for line in piece.split(b"\n"))
            filled = text.rstrip(b"\n")
            if filled:
                # Only now is it known that these newlines do not end the text.
                for start in range(0, blank, len(_NEWLINES)):
                    total.update(_NEWLINES[: blank - start])
                total.update(filled)
                blank = 0
            blank += len(text) - len(filled)
    return total.hexdigest()
