"""The data sets that are known by name: where they are published, and how a copy is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bilevax.data.errors import DataError

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_MOVIELENS = "https://files.grouplens.org/datasets/movielens/"


@dataclass(frozen=True)
class Source:
    """One published file.

    Attributes:
      file: its path in a data folder, or in the cache.
      url: where it is published; None if it cannot be downloaded without an account.
      size: its size in bytes, roughly.
      md5: the publisher's checksum, where there is one.
      text_sha256: the checksum of its lines without the blanks at their ends (`bilevax.data.checksums`), for
        files without a published checksum, copies of which differ in line ends.
    """

    file: str
    url: str | None
    size: int
    md5: str | None = None
    text_sha256: str | None = None


@dataclass(frozen=True)
class Entry:
    """A data set.

    Attributes:
      name: its name in `load`, `load_interactions` and `bilevax data`.
      what: a short description.
      sources: its files.
      counts: the number of rows, users and so on that a loaded copy must have.
      rating_range: least and largest rating, for tables of ratings.
    """

    name: str
    what: str
    sources: tuple[Source, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    rating_range: tuple[float, float] | None = None


def _libsvm(name: str, what: str, counts: Mapping[str, int], *parts: tuple[str, int, str]) -> Entry:
    sources = tuple(
        Source(f"libsvm/{file}", _LIBSVM + file, size, text_sha256=digest) for file, size, digest in parts
    )
    return Entry(name, what, sources, counts)


def _movielens(name: str, size: int, md5: str, lowest: float, users: int, items: int, ratings: int) -> Entry:
    what = f"MovieLens: {ratings:,} ratings of {items:,} films by {users:,} people"
    source = Source(f"{name}.zip", f"{_MOVIELENS}{name}.zip", size, md5=md5)
    return Entry(name, what, (source,), {"users": users, "items": items, "ratings": ratings}, (lowest, 5.0))


_ENTRIES = (
    _libsvm(
        "a8a",
        "UCI Adult: does a person earn more than 50,000 a year? 123 binary features",
        {"rows": 22_696, "test_rows": 9_865, "features": 123, "positives": 5_506, "test_positives": 2_335},
        ("a8a", 1_646_861, "d196f11c0db92a460316bf7f87c551106304f05c0b66180c19d463a43a5bd1a6"),
        ("a8a.t", 715_573, "affdb7f80d8d5384e1505432fe399e166e4b59e7901e32bd6180b2bed8cd3bbd"),
    ),
    _libsvm(
        "w8a",
        "web pages: does a page belong to a category? 300 binary features",
        {"rows": 49_749, "test_rows": 14_951, "features": 300, "positives": 1_479, "test_positives": 454},
        ("w8a", 3_527_986, "434eb5fdfe5ab0f759922fe58473326dbccaf16342ae874ac295d99322b44274"),
        ("w8a.t", 1_060_820, "7b896e1081ddcfc3f06365722430c6fcbb43a75fccd62f7ed0509788c7004dda"),
    ),
    # GroupLens publishes each checksum beside its archive, as NAME.zip.md5.
    _movielens("ml-100k", 4_924_029, "0e33842e24a9c977be4e0107933c0723", 1.0, 943, 1_682, 100_000),
    _movielens("ml-1m", 5_917_549, "c4d9eecfca2ab87c1945afe126590906", 1.0, 6_040, 3_706, 1_000_209),
    _movielens("ml-10m", 65_566_137, "ce571fd55effeba0271552578f2648bd", 0.5, 69_878, 10_677, 10_000_054),
    _movielens("ml-20m", 198_702_078, "cd245b17a1ae2cc31bb14903e1204af3", 0.5, 138_493, 26_744, 20_000_263),
    _movielens("ml-25m", 261_978_986, "6b51fb2759a8657d3bfcbfc42b592ada", 0.5, 162_541, 59_047, 25_000_095),
    Entry(
        "netflix",
        "Netflix prize: 100,480,507 ratings of 17,770 films by 480,189 people; not open for download",
        (Source("netflix", None, 2_500_000_000),),
        {"users": 480_189, "items": 17_770, "ratings": 100_480_507},
        (1.0, 5.0),
    ),
)

ENTRIES: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def entry_of(name: str) -> Entry:
    """The data set of a name.

    Raises:
      DataError: no data set has that name.

    Example:
      >>> from bilevax.data.registry import entry_of
      >>> entry_of("a8a").counts["features"]
      123
    """
    if name not in ENTRIES:
        raise DataError(f"no data set is called {name!r}; known are {', '.join(ENTRIES)}")
    return ENTRIES[name]
