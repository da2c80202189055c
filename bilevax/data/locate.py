"""The path of a known file: found in the data folder or in the cache, or downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bilevax.data.checksums import text_sha256
from bilevax.data.errors import DataError, file_errors
from bilevax.data.files import user_path
from bilevax.data.registry import Source


def obtain(source: Source, *, download: bool = True, progress: bool = True) -> Path:
    """The path of a known file, which is downloaded into the cache if it is nowhere else.

    Args:
      source: which file.
      download: whether it may be downloaded.
      progress: whether a download shows a progress bar.

    Returns:
      Its path. If the file has no published checksum, its lines have been checked against ours.

    Raises:
      DataError: it cannot be found, read or downloaded, or has other contents than the published file.
    """
    path = found(source)
    if path is not None:
        if source.text_sha256:
            check_text(path, source)
        return path
    looked = ", ".join(map(str, places(source)))
    if source.url is None:
        raise DataError(f"{source.file} cannot be downloaded; put it at one of {looked}")
    if not download:
        raise DataError(f"{source.file} is not at {looked}, and downloading is switched off")
    from bilevax.data.download import fetch

    return fetch(
        source.url,
        cache_folder() / source.file,
        md5=source.md5,
        check=(lambda part: check_text(part, source)) if source.text_sha256 else None,
        size_limit=2 * source.size,
        progress=progress,
    )


def found(source: Source) -> Path | None:
    """The path of a file, or of the folder of the same name that an archive was unpacked to.

    Raises:
      DataError: a place cannot be looked at, for lack of permission or otherwise.
    """
    for place in places(source):
        with file_errors("found", place):
            if place.exists():
                return place
            if place.suffix == ".zip" and place.with_suffix("").is_dir():
                return place.with_suffix("")
    return None


def places(source: Source) -> Iterator[Path]:
    """Where to look for a file: in the folder that BILEVAX_DATA names, if it is set, then in the cache."""
    named = os.environ.get("BILEVAX_DATA")
    if named:
        yield user_path(named) / source.file
    yield cache_folder() / source.file


def cache_folder() -> Path:
    """Where downloads are kept: the folder that BILEVAX_CACHE names, or else the user's cache folder."""
    named = os.environ.get("BILEVAX_CACHE")
    if named:
        return user_path(named)
    try:
        from platformdirs import user_cache_path
    except ImportError as error:
        raise ImportError('the cache folder needs platformdirs: pip install "bilevax[data]"') from error
    # Without a home folder, platformdirs returns a path that starts with `~`.
    return user_path(user_cache_path("bilevax"))


def check_text(path: Path, source: Source) -> None:
    """Compare a text with its known checksum, whatever its line ends.

    Raises:
      DataError: it differs, is far larger than the published file, or cannot be read.
    """
    got = text_sha256(path, size_limit=2 * source.size)
    if got != source.text_sha256:
        raise DataError(
            f"is not the published {Path(source.file).name}: its lines have the SHA-256 {got}, "
            f"expected {source.text_sha256}",
            path=path,
        )
