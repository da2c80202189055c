"""Downloads: limited in size, tried again, and checked before the file gets its name."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from bilevax.data.checksums import digest
from bilevax.data.errors import DataError, decoding_errors, file_errors, printable
from bilevax.data.files import open_regular, user_path

_PIECE = 1 << 16
_PAUSES = (1.0, 4.0)  # seconds before the second and the third attempt
_REDIRECTS = 10  # at most, per attempt


class _PassingError(Exception):
    """A failure after which another attempt may succeed."""


def fetch(
    url: str,
    target: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    md5: str | None = None,
    check: Callable[[Path], None] | None = None,
    size_limit: int = 1 << 30,
    progress: bool = True,
    timeout: float = 30.0,
    pauses: tuple[float, ...] = _PAUSES,
    schemes: tuple[str, ...] = ("https",),
) -> Path:
    """Download a file, unless it exists.

    The bytes go to a hidden file beside the target, which is renamed to the target once every check has
    passed. Whatever goes wrong, be it a full disk or an interrupt, the hidden file is removed. A lock makes a
    second process wait for the first, and then use its file. After a network failure the download is tried
    again.

    Args:
      url: where the file is published.
      target: where to put it; missing folders are made.
      sha256: its checksum, if that is known.
      md5: its MD5 checksum, for publishers that give only that.
      check: a function that takes the path of the downloaded file, and raises `DataError` to reject it.
      size_limit: most bytes to accept, both announced and sent.
      progress: whether to show a progress bar, if stderr is a terminal and rich is installed.
      timeout: an attempt fails after this many seconds of silence.
      pauses: seconds to wait before each further attempt.
      schemes: allowed schemes of URLs, also of those that the server redirects to.

    Returns:
      The target, checked.

    Raises:
      DataError: it cannot be downloaded, is too large, fails a check, or cannot be written. A file that
        existed before and fails a check is left as it is.
      ImportError: filelock is not installed.
    """
    place = user_path(target)
    _check_scheme(url, schemes)
    _check_length("sha256", sha256)
    _check_length("md5", md5)
    download = _Download(url, size_limit, progress, timeout, pauses, schemes)
    with file_errors("written", place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f".{place.name}.lock")):
            if place.exists():
                _verify(place, sha256, md5, check)
                return place
            part = place.with_name(f".{place.name}.part")
            try:
                download.to(part)
                _verify(part, sha256, md5, check, source=url)
                os.replace(part, place)
            finally:
                part.unlink(missing_ok=True)
    return place


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, whose file exists only while a process holds the lock or waits for it."""
    try:
        from filelock import FileLock
    except ImportError as error:
        raise ImportError('downloads need filelock: pip install "bilevax[data]"') from error
    with FileLock(path):
        try:
            yield
        finally:
            # Removed before the release: a process that has opened the removed file notices, and retries.
            with suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class _Download:
    """The arguments of `fetch` that concern the network."""

    url: str
    size_limit: int
    progress: bool
    timeout: float
    pauses: tuple[float, ...]
    schemes: tuple[str, ...]

    def to(self, part: Path) -> None:
        """Write the bytes to a new file, in several attempts if need be."""
        for pause in [*self.pauses, None]:
            try:
                return self._attempt(part)
            except _PassingError as error:
                if pause is None:
                    attempts = len(self.pauses) + 1
                    problem = f"{printable(self.url)} cannot be downloaded ({attempts} attempts): {error}"
                    raise DataError(problem) from error
                time.sleep(pause)

    def _attempt(self, part: Path) -> None:
        with self._response() as response, _new_file(part) as file:
            announced = _announced(response.headers.get("Content-Length"))
            if announced is not None and announced > self.size_limit:
                problem = f"has {announced:,} bytes, more than the limit of {self.size_limit:,}"
                raise DataError(f"{printable(self.url)} {problem}")
            with _bar(part.name.strip(".").removesuffix(".part"), announced, self.progress) as advance:
                received = self._copy(response, file, advance)
            if announced is not None and received != announced:
                raise _PassingError(f"the connection ended after {received:,} of {announced:,} bytes")
            file.flush()
            os.fsync(file.fileno())

    def _response(self) -> Any:
        """The server's answer, after redirections."""
        opener, url = build_opener(_NoRedirects()), self.url
        for _ in range(_REDIRECTS + 1):
            headers = {"User-Agent": "bilevax", "Accept-Encoding": "identity"}
            try:
                with _network_errors(self.url):
                    return opener.open(Request(url, headers=headers), timeout=self.timeout)
            except HTTPError as error:
                with error:
                    url = self._redirected(url, error)
        raise DataError(f"{printable(self.url)} leads to more than {_REDIRECTS} redirections")

    def _redirected(self, url: str, error: HTTPError) -> str:
        """Where an answer redirects to; any other error is raised."""
        location = error.headers.get("Location")
        answer = f"{error.code} {printable(error.reason)}"
        if error.code in (301, 302, 303, 307, 308) and location is not None:
            with _network_errors(self.url):
                new = urljoin(url, location)
            _check_scheme(new, self.schemes)
            return new
        if error.code >= 500 or error.code in (408, 429):
            raise _PassingError(f"the server answered {answer}")
        raise DataError(f"{printable(self.url)} cannot be downloaded: {answer}")

    def _copy(self, response: Any, file: IO[bytes], advance: Callable[[int], None]) -> int:
        received = 0
        while True:
            with _network_errors(self.url):
                # Not `read`: at a chunk of size -1 it would read to the end, without a limit.
                data = response.read1(_PIECE)
            if not data:
                return received
            received += len(data)
            if received > self.size_limit:
                raise DataError(
                    f"{printable(self.url)} sends more than the limit of {self.size_limit:,} bytes"
                )
            file.write(data)
            advance(len(data))


class _NoRedirects(HTTPRedirectHandler):
    """Leaves redirections to the caller: urllib would read the whole body of each, without a limit."""

    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    """Tell failures that may pass from those that will not; `HTTPError` is left to the caller."""
    try:
        yield
    except HTTPError:
        raise
    except (HTTPException, OSError) as error:
        raise _PassingError(
            printable(getattr(error, "reason", None) or error or type(error).__name__)
        ) from error
    except Exception as error:  # urllib is not written for hostile servers, and raises errors of many kinds
        raise DataError(f"{printable(url)} cannot be downloaded: {printable(error)}") from error


def _check_scheme(url: str, schemes: tuple[str, ...]) -> None:
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise DataError(f"{printable(url)} is not a URL: {error}") from error
    if scheme not in schemes:
        raise DataError(f"{printable(url)} is not a URL of the kind {' or '.join(schemes)}")


def _check_length(algorithm: str, expected: str | None) -> None:
    if expected is not None and len(expected) != 2 * hashlib.new(algorithm).digest_size:
        raise ValueError(f"{algorithm} must be a hexadecimal checksum of that kind, got {expected!r}")


def _announced(length: str | None) -> int | None:
    if length is None or not (length.isascii() and length.isdigit()):
        return None
    # Nineteen digits are above any limit, and Python does not convert thousands of them.
    return int(length.lstrip("0")[:19] or "0")


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file to write to; a link at its path is removed and not followed."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        yield file


def _verify(
    path: Path,
    sha256: str | None,
    md5: str | None,
    check: Callable[[Path], None] | None,
    source: str | None = None,
) -> None:
    with open_regular(path):
        pass  # rejects folders and devices, even if there is no checksum
    shown = printable(source or path)
    for algorithm, expected in (("sha256", sha256), ("md5", md5)):
        if expected is None:
            continue
        got = digest(path, algorithm)
        if got != expected.lower():
            raise DataError(f"{shown} has the {algorithm} {got}, expected {expected}")
    if check is not None:
        with decoding_errors("cannot be checked", path):
            check(path)


@contextmanager
def _bar(name: str, total: int | None, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes received since its last call."""
    try:
        from rich import progress as rich
        from rich.console import Console
        from rich.markup import escape
    except ImportError:
        wanted = False
    if not wanted or not _on_terminal():
        yield lambda _: None
        return
    columns = (
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress("{task.description}", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(escape(name), total=total)
        yield lambda count: bar.advance(task, count)


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # it is None without a console, or closed
        return False
