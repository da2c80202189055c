"""Downloads that are checked before anybody sees them: limited in size, tried again, never half there."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from bilevax.data.checksums import digest
from bilevax.data.errors import DataError
from bilevax.data.locks import locked

_PIECE = 1 << 16
_PAUSES = (1.0, 4.0)  # seconds before the second and the third attempt


class _PassingError(Exception):
    """A failure that another attempt may mend."""


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
    """Download a file, unless it is there already.

    The bytes go to a hidden file beside the target, which takes the target's name in one step once every
    check has passed; whatever goes wrong, a full disk and an interrupt too, it is removed. A lock makes a
    second process wait for the first, and then use its file. Failures of the network are tried again.

    Args:
      url: where it is published.
      target: where it goes; folders are made.
      sha256: its checksum, if that is known.
      md5: its MD5 checksum, for publishers that give only that.
      check: a function of the path of the downloaded file, that raises `DataError` if it is not right.
      size_limit: most bytes that are accepted, by what the server announces and by what it sends.
      progress: whether to show a bar, where errors go to a terminal and rich is installed.
      timeout: seconds of silence after which an attempt is given up.
      pauses: seconds to wait before each further attempt.
      schemes: of URLs, redirections included, that are allowed.

    Returns:
      The target, checked.

    Raises:
      DataError: it cannot be had, is too large, fails a check, or cannot be written. A file that was at the
        target before and fails a check is left as it is.
    """
    place = Path(target)
    _check_scheme(url, schemes)
    _check_length("sha256", sha256)
    _check_length("md5", md5)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_name(f".{place.name}.lock")):
            if place.exists():
                _verify(place, sha256, md5, check)
                return place
            part = place.with_name(f".{place.name}.part")
            try:
                _download(url, part, size_limit, progress, timeout, pauses, schemes)
                _verify(part, sha256, md5, check, source=url)
                os.replace(part, place)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error} ({place.parent})"
        raise DataError(reason, path=place) from error
    return place


def _download(
    url: str,
    part: Path,
    size_limit: int,
    progress: bool,
    timeout: float,
    pauses: tuple[float, ...],
    schemes: tuple[str, ...],
) -> None:
    for pause in [*pauses, None]:
        try:
            return _attempt(url, part, size_limit, progress, timeout, schemes)
        except _PassingError as error:
            if pause is None:
                attempts = len(pauses) + 1
                raise DataError(f"{url} cannot be downloaded ({attempts} attempts): {error}") from error
            time.sleep(pause)


def _attempt(
    url: str, part: Path, size_limit: int, progress: bool, timeout: float, schemes: tuple[str, ...]
) -> None:
    opener = build_opener(_Redirects(schemes))
    request = Request(url, headers={"User-Agent": "bilevax", "Accept-Encoding": "identity"})
    with _network_errors(url):
        response = opener.open(request, timeout=timeout)
    with response, open(part, "wb") as file:
        announced = _announced(response.headers.get("Content-Length"))
        if announced is not None and announced > size_limit:
            raise DataError(f"{url} has {announced:,} bytes, more than the limit of {size_limit:,}")
        with _bar(part.name.strip(".").removesuffix(".part"), announced, progress) as advance:
            received = _copy(url, response, file, size_limit, advance)
        if announced is not None and received != announced:
            raise _PassingError(f"the connection ended after {received:,} of {announced:,} bytes")
        file.flush()
        os.fsync(file.fileno())


def _copy(
    url: str, response: IO[bytes], file: IO[bytes], size_limit: int, advance: Callable[[int], None]
) -> int:
    received = 0
    while True:
        with _network_errors(url):
            data = response.read(_PIECE)
        if not data:
            return received
        received += len(data)
        if received > size_limit:
            raise DataError(f"{url} sends more than the limit of {size_limit:,} bytes")
        file.write(data)
        advance(len(data))


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    """Tell failures that may pass from those that will not."""
    try:
        yield
    except HTTPError as error:
        with error:
            if error.code >= 500 or error.code in (408, 429):
                raise _PassingError(f"the server answered {error.code} {error.reason}") from error
            raise DataError(f"{url} cannot be downloaded: {error.code} {error.reason}") from error
    except (URLError, HTTPException, OSError) as error:
        raise _PassingError(getattr(error, "reason", None) or error or type(error).__name__) from error


class _Redirects(HTTPRedirectHandler):
    """Follows redirections, but not out of the allowed schemes."""

    def __init__(self, schemes: tuple[str, ...]):
        self.schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_scheme(newurl, self.schemes)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_scheme(url: str, schemes: tuple[str, ...]) -> None:
    if urlsplit(url).scheme not in schemes:
        raise DataError(f"{url} is not a URL of the kind {' or '.join(schemes)}")


def _check_length(algorithm: str, expected: str | None) -> None:
    if expected is not None and len(expected) != 2 * hashlib.new(algorithm).digest_size:
        raise ValueError(f"{algorithm} must be a hexadecimal checksum of that kind, got {expected!r}")


def _announced(length: str | None) -> int | None:
    return int(length) if length is not None and length.isascii() and length.isdigit() else None


def _verify(
    path: Path,
    sha256: str | None,
    md5: str | None,
    check: Callable[[Path], None] | None,
    source: str | None = None,
) -> None:
    shown = source or path
    for algorithm, expected in (("sha256", sha256), ("md5", md5)):
        if expected is None:
            continue
        got = digest(path, algorithm)
        if got != expected.lower():
            raise DataError(f"{shown} has the {algorithm} {got}, expected {expected}")
    if check is not None:
        check(path)


@contextmanager
def _bar(name: str, total: int | None, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told how many bytes have come."""
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:
        wanted = False
    if not wanted or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress("{task.description}", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)
