"""Interactions by the name of a data set, or from a file, a folder or an archive."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import IO

import numpy as np

from bilevax.data.archives import open_archive
from bilevax.data.errors import DataError, file_errors, printable
from bilevax.data.files import SIZE_LIMIT, UNPACKERS, open_bytes, user_path
from bilevax.data.generate import SHAPES, interactions
from bilevax.data.interactions import Columns, Duplicates, Interactions, make_interactions
from bilevax.data.locate import obtain
from bilevax.data.movielens import LAYOUTS, read_movielens
from bilevax.data.netflix import read_netflix
from bilevax.data.registry import ENTRIES, entry_of
from bilevax.data.tables import read_table

NAMES = tuple(name for name, entry in ENTRIES.items() if "ratings" in entry.counts)
_COMBINED = re.compile(r"combined_data_\d+\.txt")
_NETFLIX = re.compile(r"(combined_data_\d+|mv_\d+)\.txt")
_TABLES = (".csv", ".tsv", ".tab", ".parquet")
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


def load_interactions(
    source: str | PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    duplicates: Duplicates = "error",
    rating_range: tuple[float, float] | None = None,
    download: bool = True,
    size_limit: int = SIZE_LIMIT,
) -> Interactions:
    """Ratings of items by users: a known data set, or any file of a known format.

    By name: `ml-100k`, `ml-1m`, `ml-10m`, `ml-20m`, `ml-25m` and `netflix` are searched for in the folder
    that BILEVAX_DATA names (`ml-1m.zip`, or the folder `ml-1m`), then in the cache; otherwise MovieLens is
    downloaded into the cache. The numbers of users, items and ratings are checked. `like-ml-1m`,
    `like-ml-20m` and `like-netflix` are generated (`bilevax.data.generate`), with seed 0.

    By path: MovieLens' `u.data`, `ratings.dat` and `ratings.csv`; the Netflix prize's `combined_data_*.txt`
    and `mv_*.txt`; any other .csv, .tsv or .parquet with named columns. Each plain, packed (.gz, .bz2, .xz),
    or in a folder, a zip or a tar archive with one such table (or all the files of the Netflix prize).

    Args:
      source: a name or a path. Names take precedence: write `./ml-1m` for a folder called `ml-1m`.
      columns: for tables, their names of `user`, `item`, `rating` and `time` (`bilevax.data.tables`).
      duplicates: what to do if a pair of user and item occurs again: "error", or keep the "first" or "last"
        in order of time.
      rating_range: smallest and largest valid rating. MovieLens and Netflix have their own.
      download: whether a data set may be downloaded.
      size_limit: most bytes to read from one file.

    Returns:
      The table, in the order of the file.

    Raises:
      DataError: it cannot be found, read or downloaded, or a check fails; the message names file and line.

    Example:
      >>> from bilevax.data import load_interactions
      >>> load_interactions("like-ml-1m")
      Interactions(1,000,209 ratings of 3,706 items by 6,040 users)
    """
    name = fspath(source)
    if name in SHAPES:
        return interactions(name, seed=0).table
    counts: Mapping[str, int] = {}
    if name in NAMES:
        entry = entry_of(name)
        path, counts = obtain(entry.sources[0], download=download), entry.counts
        rating_range = rating_range or entry.rating_range
    else:
        path = user_path(name)
        with file_errors("found", path):
            exists = path.exists()
        if not exists:
            known = ", ".join([*NAMES, *SHAPES])
            raise DataError(f"no such file, and no data set of that name; known are {known}", path=path)
    parts = [_read(stream, file, columns, rating_range, size_limit) for file, stream in _open_tables(path)]
    table = make_interactions(
        *map(np.concatenate, zip(*parts, strict=True)),
        duplicates=duplicates,
        rating_range=rating_range,
        path=path,
    )
    for what, expected in counts.items():
        got = {"users": table.users, "items": table.items, "ratings": len(table)}[what]
        if got != expected:
            raise DataError(f"has {got:,} {what}, expected {expected:,} in {name}", path=path)
    return table


def _read(
    stream: IO[bytes],
    file: str,
    columns: Mapping[str, str] | None,
    rating_range: tuple[float, float] | None,
    size_limit: int,
) -> Columns:
    name = _plain_name(file)
    if name in LAYOUTS and columns is None:
        return read_movielens(
            stream, LAYOUTS[name], file, rating_range=rating_range or (0.5, 5.0), size_limit=size_limit
        )
    if _NETFLIX.fullmatch(name):
        return read_netflix(stream, file, rating_range=rating_range or (1.0, 5.0), size_limit=size_limit)
    return read_table(stream, file, columns=columns, size_limit=size_limit)


def _open_tables(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The tables at a path, each open for reading."""
    with file_errors("opened", path):
        files = _files_in(path) if path.is_dir() else None
    if files is not None:
        archives = [file for file in files if file.lower().endswith(_ARCHIVES)]
        if not any(map(_is_table, files)) and len(archives) == 1:
            yield from _open_tables(path / archives[0])
            return
        for file in _chosen(files, path):
            with open_bytes(path / file) as stream:
                yield file, stream
    elif path.name.lower().endswith(_ARCHIVES):
        with open_archive(path) as archive:
            members = {member.name: member for member in archive.members}
            for file in _chosen(sorted(members), path):
                with archive.open(members[file]) as stream:
                    yield file, stream
    else:
        if not _is_table(path.name):
            kinds = ", ".join([*LAYOUTS, "combined_data_*.txt", "mv_*.txt", *(f"*{end}" for end in _TABLES)])
            raise DataError(f"has no known format; known are {kinds}, packed or in an archive", path=path)
        with open_bytes(path) as stream:
            yield path.name, stream


def _files_in(folder: Path) -> list[str]:
    """The paths of all regular files in a folder, relative to it; raises if a subfolder cannot be read."""
    files, folders = [], [""]
    while folders:  # not recursive, as folders may be nested deeper than Python's stack
        inner = folders.pop()
        with os.scandir(folder / inner) as entries:
            for entry in entries:
                name = os.path.join(inner, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file():
                    files.append(name)
    return sorted(files)


def _chosen(files: list[str], path: Path) -> list[str]:
    """Those of several files that hold the ratings."""
    names = {file: _plain_name(file) for file in files}
    for group in (
        [file for file in files if names[file] in LAYOUTS],
        [file for file in files if _COMBINED.fullmatch(names[file])],
        [file for file in files if _NETFLIX.fullmatch(names[file])],
        [file for file in files if _is_table(file)],
    ):
        if len(group) == 1 or (group and all(_NETFLIX.fullmatch(names[file]) for file in group)):
            return group
        if group:
            shown = printable(", ".join(group[:5]))
            raise DataError(f"holds several tables, expected one: {shown}", path=path)
    raise DataError("holds no table of ratings", path=path)


def _is_table(file: str) -> bool:
    name = _plain_name(file)
    return name in LAYOUTS or name.lower().endswith(_TABLES) or _NETFLIX.fullmatch(name) is not None


def _plain_name(file: str) -> str:
    """The name of a file without its folders and without the ending that says how it is packed."""
    name = PurePath(file)
    return name.stem if name.suffix.lower() in UNPACKERS else name.name
