"""Every parser of `bilevax.data`, with its inputs, and what must hold if it accepts one.

As a program (`make fuzz`) it feeds each parser the number of inputs in its argument, and prints a table.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bad_bytes import packed, parquets, tars, texts, zips
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from bilevax.data import DataError, load_interactions, read_libsvm
from bilevax.data.archives import safe_extract
from bilevax.data.checksums import text_sha256
from bilevax.data.files import open_bytes

LIBSVM = (b"-1 1:0.5 3:2 \r\n+1 2:-1e-3\n-1\n", b"0.5 1:1 7:1\n-2.25 3:.5")
DAT = (b"1::2::3::4\n7::300::4.5::978300019\n",)
TAB = (b"1\t2\t3\t4\r\n7\t300\t4.5\t978300019\r\n",)
CSV = (b"userId,movieId,rating,timestamp\n1,2,3.5,4\n7,300,4.5,978300019\n",)
NETFLIX = (b"1:\n7,4,2005-09-06\n2,5,1999-12-31\n12:\n7,1,2004-02-29\n",)
TABLE = (
    b'user,item,rating,time\nbo,2,3.5,4\n"a,l",300,4.5,978300019\n',
    b"user,item,date\n1,2,2005-09-06\n1,3,2005-09-07T10:00:00Z\n",
    b"uid\titem_id\tscore\ttimestamp\n1\t2\t3\t4\n",
)


def parse_libsvm(path: Path) -> None:
    rows, labels = read_libsvm(path, line_limit=2000, size_limit=100_000)
    assert rows.shape[0] == len(labels) > 0
    assert np.isfinite(rows.data).all()
    assert np.isfinite(labels).all()
    rows.check_format(full_check=True)
    assert rows.has_canonical_format


def parse_interactions(path: Path) -> None:
    table = load_interactions(path, duplicates="last", size_limit=100_000)
    assert len(table) > 0
    assert table.user.min() >= 0
    assert table.user.max() < table.users
    assert table.item.min() >= 0
    assert table.item.max() < table.items
    assert np.isfinite(table.rating).all()
    assert len(np.unique(table.user.astype(np.int64) * table.items + table.item)) == len(table)
    assert len(table.csr()) == len(table)


def parse_archive(path: Path) -> None:
    before = set(path.parent.iterdir())
    target = path.parent / "unpacked" / "here"
    try:
        for file in safe_extract(path, target, size_limit=1 << 18):
            assert file.resolve().is_relative_to(target.resolve())
            assert file.is_file()
            assert not file.is_symlink()
    finally:
        found = {file for file in path.parent.rglob("*") if file not in before}
        allowed = {target.parent}
        assert all(file in allowed or file.is_relative_to(target) for file in found), found
        for file in sorted(found, reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


def parse_bytes(path: Path) -> None:
    assert len(text_sha256(path, size_limit=100_000)) == 64
    with open_bytes(path) as stream:
        assert stream is not None


@dataclass(frozen=True)
class Target:
    """A parser, the name of its file, and its inputs."""

    file: str
    inputs: SearchStrategy[bytes]
    parse: Callable[[Path], None]


TARGETS = {
    "libsvm": Target("rows", texts(*LIBSVM), parse_libsvm),
    "libsvm, gzip": Target("rows.gz", packed(*LIBSVM), parse_libsvm),
    "libsvm, bzip2": Target("rows.bz2", packed(*LIBSVM), parse_libsvm),
    "libsvm, xz": Target("rows.xz", packed(*LIBSVM), parse_libsvm),
    "u.data": Target("u.data", texts(*TAB), parse_interactions),
    "ratings.dat": Target("ratings.dat", texts(*DAT), parse_interactions),
    "ratings.csv": Target("ratings.csv", texts(*CSV), parse_interactions),
    "netflix": Target("combined_data_1.txt", texts(*NETFLIX), parse_interactions),
    "csv table": Target("table.csv", texts(*TABLE), parse_interactions),
    "tsv table": Target("table.tsv", texts(*TABLE), parse_interactions),
    "parquet table": Target("table.parquet", parquets(), parse_interactions),
    "zip archive": Target("set.zip", zips(*DAT), parse_archive),
    "tar archive": Target("set.tar", tars(*DAT), parse_archive),
    "ratings in a zip": Target("set.zip", zips(*DAT, *CSV), parse_interactions),
    "ratings in a tar": Target("set.tar", tars(*DAT, *CSV), parse_interactions),
    "checksum of a text": Target("text.gz", packed(*LIBSVM), parse_bytes),
}


def fuzz(name: str, examples: int, start: int = 0) -> Counter[str]:
    """Feed a parser; count the inputs that it accepts and refuses. Errors other than `DataError` are raised.

    Hypothesis stops early if it takes the inputs to be exhausted: it is started again until there are as
    many inputs as requested.
    """
    target, outcome = TARGETS[name], Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, target.file)

        def feed(data: bytes) -> None:
            path.write_bytes(data)
            try:
                target.parse(path)
                outcome["accepted"] += 1
            except DataError:
                outcome["refused"] += 1

        while outcome.total() < examples:
            feeding = given(data=target.inputs)(feed)
            options = settings(
                max_examples=min(10_000, examples - outcome.total()),
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            seed(start + outcome.total())(options(feeding))()
    return outcome


def main() -> None:
    """Feed every parser and print the counts."""
    examples = int(sys.argv[1])
    total = Counter()
    print(f"{'parser':<20}{'inputs':>10}{'accepted':>10}{'refused':>10}{'seconds':>10}", flush=True)
    for name in TARGETS:
        began = time.perf_counter()
        outcome = fuzz(name, examples)
        total += outcome
        took = time.perf_counter() - began
        counts = f"{outcome.total():>10}{outcome['accepted']:>10}{outcome['refused']:>10}"
        print(f"{name:<20}{counts}{took:>10.1f}", flush=True)
    print(f"{total.total():,} inputs, {total['refused']:,} of them refused; no other error than DataError")


if __name__ == "__main__":
    main()
