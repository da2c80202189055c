"""Zip and tar archives that nobody trusts: members stay in their folder, and bombs are cut short."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from bilevax.data.errors import DataError
from bilevax.data.files import SIZE_LIMIT, open_bytes, read_pieces

COUNT_LIMIT = 50_000  # members; the Netflix prize's archive has 17,770
RATIO_LIMIT = 200  # times its own size that an archive may unpack to; tables of numbers reach some 20
_FREE = 1 << 20  # bytes that may be unpacked whatever the ratio: tiny archives are allowed to be well packed

_PACKED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}

# What zipfile and tarfile raise for damaged archives; the list is what fuzzing them has shown.
_DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(ValueError, OverflowError, LookupError, RuntimeError, MemoryError, struct.error),
)


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, the bytes that it declares, and what the archive knows it by."""

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
            name = entry.filename if zipped else entry.name
            self._check_name(name)
            kind = _zip_kind(entry) if zipped else _tar_kind(entry)
            if kind == "folder":
                continue
            if kind != "file":
                raise DataError(f"the member {name!r} is {kind}, expected files and folders", path=self.path)
            if name in files:
                raise DataError(f"has the member {name!r} twice", path=self.path)
            files[name] = Member(name, entry.file_size if zipped else entry.size, entry)
        return tuple(files.values())

    def _check_name(self, name: str) -> None:
        parts = PurePosixPath(name).parts
        absolute = name.startswith("/") or (len(name) > 1 and name[1] == ":")
        if not parts or absolute or ".." in parts or "\\" in name or "\0" in name:
            raise DataError(f"the member {name!r} would leave the folder of the archive", path=self.path)

    @contextmanager
    def open(self, member: Member) -> Iterator[IO[bytes]]:
        """A member, open for reading."""
        try:
            if isinstance(self.opened, zipfile.ZipFile):
                stream = self.opened.open(member.handle)
            else:
                stream = self.opened.extractfile(member.handle)
        except _DAMAGED as error:
            raise _damaged(self.path, error) from error
        if stream is None:
            raise DataError(f"the member {member.name!r} is not a file", path=self.path)
        with stream:
            yield _Shielded(stream, self.path)  # type: ignore[misc]


class _Shielded:
    """A stream, all of whose failures are `DataError`s."""

    def __init__(self, stream: IO[bytes], path: Path):
        self.stream, self.path = stream, path

    def read(self, size: int = -1) -> bytes:
        try:
            return self.stream.read(size)
        except _DAMAGED as error:
            raise _damaged(self.path, error) from error


class _Capped:
    """A stream that is never unpacked beyond a limit, not even to skip over a member."""

    def __init__(self, stream: IO[bytes], limit: int, path: Path):
        self.stream, self.limit, self.path = stream, limit, path
        self.end = limit + _FREE  # the headers of the members come on top

    def read(self, size: int = -1) -> bytes:
        room = self.end - self.stream.tell()
        data = self.stream.read(room + 1 if size < 0 else min(size, room + 1))
        self._check(self.stream.tell())
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        if whence != 0:
            raise tarfile.ReadError("an archive is only searched from its start")
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


def _unpacked(path: Path) -> IO[bytes]:
    """A file open for reading, unpacked if its first bytes say that it is packed."""
    with open(path, "rb") as file:
        start = file.read(6)
    for magic, opener in _PACKED.items():
        if start.startswith(magic):
            return opener(path, "rb")
    return open(path, "rb")


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
      DataError: it is no archive or damaged; a member's name is absolute or has `..`, a backslash or a drive
        in it, occurs twice, or belongs to a link, a device or the like; a member is encrypted; a limit is
        passed.
    """
    place = Path(path)
    with open_bytes(place):
        pass  # the usual words for a file that is not there
    with ExitStack() as stack:
        try:
            limit = min(size_limit, max(_FREE, int(ratio_limit * place.stat().st_size)))
            capped = None
            if zipfile.is_zipfile(place):
                opened = stack.enter_context(zipfile.ZipFile(place))
            else:
                capped = _Capped(stack.enter_context(_unpacked(place)), limit, place)
                opened = stack.enter_context(tarfile.open(fileobj=capped, mode="r:"))  # type: ignore[arg-type]
            archive = Archive(place, opened, limit, count_limit)
            if capped is not None:
                capped.drain()
        except _DAMAGED as error:
            raise _damaged(place, error) from error
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
      folder: where to; it must not exist, or be empty.
      size_limit: most bytes that are written, whatever the archive declares.
      ratio_limit: most bytes that are written per byte of the archive.
      count_limit: most members.

    Returns:
      The files that were written.

    Raises:
      DataError: as `open_archive`, or a limit is passed, or the folder is not empty or cannot be written.

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
    target = Path(folder)
    limits = {"size_limit": size_limit, "ratio_limit": ratio_limit, "count_limit": count_limit}
    with open_archive(path, **limits) as archive:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise DataError("exists and is not an empty folder", path=target)
        limit, beside = archive.limit, None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            for member in archive.members:
                limit -= _write(archive, member, beside / member.name, limit)
            os.replace(beside, target)
        except OSError as error:
            raise DataError(f"cannot be unpacked: {error.strerror or error}", path=path) from error
        finally:
            if beside is not None:
                shutil.rmtree(beside, ignore_errors=True)
        return [target / member.name for member in archive.members]


@contextmanager
def open_member(path: str | os.PathLike[str], name: str) -> Iterator[IO[bytes]]:
    """A file in an archive, open for reading without unpacking the rest.

    Read it through `bilevax.data.files.read_pieces`, which limits its size.

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
            raise DataError(f"has {len(fitting)} members called {name!r}, expected one", path=path)
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


def _damaged(path: Path, error: BaseException) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"is no zip or tar archive, or damaged: {error or type(error).__name__}", path=path)
