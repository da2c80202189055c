"""A known file, found on disk or downloaded, and checked."""

from __future__ import annotations

from pathlib import Path

from bilevax.data.checksums import text_sha256
from bilevax.data.errors import DataError
from bilevax.data.registry import Source, cache_folder, found, places


def obtain(source: Source, *, download: bool = True, progress: bool = True) -> Path:
    """The path of a known file, which is downloaded into the cache if it is nowhere else.

    Args:
      source: which file.
      download: whether it may be downloaded.
      progress: whether a download shows its progress.

    Returns:
      Where it is. The lines of a text without a published checksum have been checked against ours.

    Raises:
      DataError: it cannot be had, or it is not the file that it should be.
    """
    path = found(source)
    if path is not None:
        if source.text_sha256:
            check_text(path, source)
        return path
    looked = ", ".join(str(place) for place in places(source))
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


def check_text(path: Path, source: Source) -> None:
    """Compare a text with the checksum that is known for it, whatever its line ends."""
    got = text_sha256(path)
    if got != source.text_sha256:
        raise DataError(
            f"is not the published {Path(source.file).name}: its lines have the SHA-256 {got}, "
            f"expected {source.text_sha256}",
            path=path,
        )
