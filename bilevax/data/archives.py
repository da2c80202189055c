"""Untrusted zip and tar archives: members stay in their folder, and limits stop decompression bombs."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from bilevax.data.errors import DataError, decoding_errors, file_errors, printable
from bilevax.data.files import SIZE_LIMIT, open_regular, read_pieces, user_path

COUNT_LIMIT = 50_000  # members; the Netflix prize's archive has 17,770
RATIO_LIMIT = 200  # an archive may unpack to this many times its size; tables of numbers reach some 20
_DEPTH_LIMIT = 100  # folders around a member; making or removing deeper ones exhausts Python's stack
_HEADER_LIMIT = 1 << 14  # bytes of one header of a tar archive, for which tarfile may take quadratic time
_DIGITS = re.compile(rb"[0-9]{300}")  # no name or number is as long, and some versions of tarfile hang here
_FREE = 1 << 20  # bytes that may be unpacked at any ratio: tiny archives may be packed very well

_UNPACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_DAMAGED = "is no zip or tar archive, or damaged"


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, its declared size in bytes, and the archive's own record of it."""

    name: str
    size: int
    handle: Any


class Archive:
    """A zip or tar archive open for reading; use `open_archive`."""

    def __init__(self, path: Path, opened: zipfile.ZipFile | tarfile.TarFile, limit: int, count_limit: int):
        self.path, self.opened, self.limit = path, opened, limit
        self.members = self._listed(count_limit)
        if sum(member.size for member in self.members) > limit:
            raise DataError(f"declares more than the limit of {limit:,} unpacked bytes", path=path)

    def _listed(self, count_limit: int) -> tuple[Member, ...]:
        """The files of the archive, after every name and kind has been checked."""
        files: dict[str, Member] = {}
        entries = self.opened.infolist() if isinstance(self.opened, zipfile.ZipFile) else self.opened
        for count, entry in enumerate(entries, 1):
            if count > count_limit:
                raise DataError(f"has more than the limit of {count_limit:,} members", path=self.path)
            zipped = isinstance(entry, zipfile.ZipInfo)
            name, size = (entry.filename, entry.file_size) if zipped else (entry.name, entry.size)
            self._check_name(name)
            if size < 0:
                raise DataError(f"the member '{printable(name)}' has a negative size", path=self.path)
            kind = _zip_kind(entry) if zipped else _tar_kind(entry)
            if kind == "folder":
                continue
            if kind != "file":
                problem = f"the member '{printable(name)}' is {kind}, expected files and folders"
                raise DataError(problem, path=self.path)
            if name in files:
                raise DataError(f"has the member '{printable(name)}' twice", path=self.path)
            files[name] = Member(name, size, entry)
        return tuple(files.values())

    def _check_name(self, name: str) -> None:
        parts = PurePosixPath(name).parts
        absolute = name.startswith("/") or (len(name) > 1 and name[1] == ":")
        if not parts or absolute or ".." in parts or "\\" in name or "\0" in name:
            problem = f"the member '{printable(name)}' would leave the folder of the archive"
            raise DataError(problem, path=self.path)
        if len(parts) > _DEPTH_LIMIT:
            problem = f"the member '{printable(name, 40)}' is in more than {_DEPTH_LIMIT} folders"
            raise DataError(problem, path=self.path)

    @contextmanager
    def open(self, member: Member) -> Iterator[IO[bytes]]:
        """A member, open for reading."""
        with decoding_errors(_DAMAGED, self.path):
            if isinstance(self.opened, zipfile.ZipFile):
                stream = self.opened.open(member.handle)
            else:
                stream = self.opened.extractfile(member.handle)
        if stream is None:
            raise DataError(f"the member '{printable(member.name)}' is not a file", path=self.path)
        with stream:
            yield _Shielded(stream, self.path)  # type: ignore[misc]


class _Shielded:
    """A stream that raises nothing but `DataError`."""

    def __init__(self, stream: IO[bytes], path: Path):
        self.stream, self.path = stream, path

    def read(self, size: int = -1) -> bytes:
        with decoding_errors(_DAMAGED, self.path):
            return self.stream.read(size)


class _Capped:
    """A stream that is never unpacked beyond a limit, not even to skip over a member."""

    def __init__(self, stream: IO[bytes], limit: int, path: Path):
        self.stream, self.limit, self.path = stream, limit, path
        self.end = limit + _FREE  # the headers of the members come on top
        self.listing = True  # while the headers are read

    def read(self, size: int = -1) -> bytes:
        if self.listing and not 0 <= size <= _HEADER_LIMIT:
            raise DataError(f"has a header of more than {_HEADER_LIMIT:,} bytes", path=self.path)
        room = self.end - self.stream.tell()
        data = self.stream.read(room + 1 if size < 0 else min(size, room + 1))
        self._check(self.stream.tell())
        if self.listing and _DIGITS.search(data):
            raise DataError("has a header with a number of more than 300 digits", path=self.path)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        if whence != 0:
            raise tarfile.ReadError("an archive is only searched from its start")
        if self.listing and place < self.stream.tell() - 1:
            # After a negative size, the same headers would be read again and again.
            raise DataError("has headers that lead back to earlier ones", path=self.path)
        self._check(place)
        return self.stream.seek(place)

    def tell(self) -> int:
        return self.stream.tell()

    def drain(self) -> None:
        """Read to the end, where a packed stream keeps its checksum."""
        while self.read(1 << 20):
            pass

    def _check(self, place: int) -> None:
        if place > self.end:
            raise DataError(f"unpacks to more than the limit of {self.limit:,} bytes", path=self.path)


@contextmanager
def _unpacked(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """An open file, unpacked if its first bytes say that it is packed."""
    start = file.read(6)
    file.seek(0)
    for magic, unpack in _UNPACKERS.items():
        if start.startswith(magic):
            with unpack(file, "rb") as stream:
                yield stream
            return
    yield file


@contextmanager
def open_archive(
    path: str | os.PathLike[str],
    *,
    size_limit: int = SIZE_LIMIT,
    ratio_limit: float = RATIO_LIMIT,
    count_limit: int = COUNT_LIMIT,
) -> Iterator[Archive]:
    """Open a zip or tar archive (packed with gzip, bzip2 or xz, or not) and check all its members.

    Args:
      path: the archive.
      size_limit: most bytes that are unpacked, whatever the archive declares.
      ratio_limit: most bytes that are unpacked per byte of the archive.
      count_limit: most members that are accepted.

    Raises:
      DataError: it is no archive or damaged; a member's name is absolute, has `..`, a backslash or a drive in
        it, lies in more than 100 folders or occurs twice; a member is encrypted, a link, a device or the
        like; a limit is exceeded.
    """
    place = user_path(path)
    with ExitStack() as stack:
        file = stack.enter_context(open_regular(place))
        with decoding_errors(_DAMAGED, place):
            limit = int(min(size_limit, max(_FREE, ratio_limit * os.fstat(file.fileno()).st_size)))
            if zipfile.is_zipfile(file):
                archive = Archive(place, stack.enter_context(zipfile.ZipFile(file)), limit, count_limit)
            else:
                file.seek(0)
                capped = _Capped(stack.enter_context(_unpacked(file)), limit, place)
                opened = stack.enter_context(tarfile.open(fileobj=capped, mode="r:"))  # type: ignore[arg-type]
                archive = Archive(place, opened, limit, count_limit)
                capped.listing = False
                capped.drain()
        yield archive


def safe_extract(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    size_limit: int = SIZE_LIMIT,
    ratio_limit: float = RATIO_LIMIT,
    count_limit: int = COUNT_LIMIT,
) -> list[Path]:
    """Unpack an archive into a new folder, all of it or nothing.

    Args:
      path: the archive, zip or tar.
      folder: where to unpack it; it must be empty, or not exist.
      size_limit: most bytes that are written, whatever the archive declares.
      ratio_limit: most bytes that are written per byte of the archive.
      count_limit: most members.

    Returns:
      The files that were written.

    Raises:
      DataError: as `open_archive`, or the folder is not empty or cannot be written.

    Example:
      >>> import tempfile, zipfile
      >>> from pathlib import Path
      >>> from bilevax.data.archives import safe_extract
      >>> with tempfile.TemporaryDirectory() as place:
      ...     with zipfile.ZipFile(Path(place, "bad.zip"), "w") as archive:
      ...         archive.writestr("../escaped", "text")
      ...     safe_extract(Path(place, "bad.zip"), Path(place, "out"))
      Traceback (most recent call last):
      bilevax.data.errors.DataError: bad.zip: the member '../escaped' would leave the folder of the archive
    """
    target = user_path(folder)
    limits = {"size_limit": size_limit, "ratio_limit": ratio_limit, "count_limit": count_limit}
    with open_archive(path, **limits) as archive, file_errors("unpacked", target):
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise DataError("exists and is not an empty folder", path=target)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".unpacked.", dir=target.parent))
        try:
            limit = archive.limit
            for member in archive.members:
                limit -= _write(archive, member, beside / member.name, limit)
            os.replace(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return [target / member.name for member in archive.members]


@contextmanager
def open_member(path: str | os.PathLike[str], name: str) -> Iterator[IO[bytes]]:
    """A file in an archive, open for reading; the rest is not unpacked.

    Read it with `bilevax.data.files.read_pieces`, which limits its size.

    Args:
      path: the archive.
      name: the member's name, or the last part of it if only one member has it.

    Raises:
      DataError: as `open_archive`, or not exactly one member has that name.
    """
    with open_archive(path) as archive:
        exact = [member for member in archive.members if member.name == name]
        fitting = exact or [m for m in archive.members if PurePosixPath(m.name).name == name]
        if len(fitting) != 1:
            raise DataError(f"has {len(fitting)} members called {name!r}, expected one", path=archive.path)
        with archive.open(fitting[0]) as stream:
            yield stream


def _write(archive: Archive, member: Member, place: Path, limit: int) -> int:
    place.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with archive.open(member) as stream, open(place, "xb") as file:
        for data in read_pieces(stream, archive.path, size_limit=limit, piece=1 << 20):
            file.write(data)
            written += len(data)
    return written


def _zip_kind(entry: zipfile.ZipInfo) -> str:
    if entry.flag_bits & 1:
        return "encrypted"
    mode = stat.S_IFMT(entry.external_attr >> 16)
    if entry.is_dir():
        return "folder"
    return "file" if mode in (0, stat.S_IFREG) else "a link or a device"


def _tar_kind(entry: tarfile.TarInfo) -> str:
    if entry.isdir():
        return "folder"
    return "file" if entry.isreg() and not entry.issparse() else "a link or a device"
