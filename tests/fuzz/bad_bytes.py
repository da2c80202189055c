"""Bytes for a parser: noise, tokens of the format in any order, and good files with changes."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pyarrow
from hypothesis import strategies as st
from pyarrow import parquet

_NUMBERS = [b"0", b"1", b"2", b"3", b"5", b"07", b"-1", b"+1", b"1.5", b".5", b"5.", b"1e3", b"1e999", b"nan"]
_ODD = [b"inf", b"", b" ", b"1_0", b"9" * 19, b"9" * 400, b"0x1", b"\xd9\xa1", b"-", b".", b"True", b"NULL"]
_WORDS = [
    b"user",
    b"item",
    b"rating",
    b"time",
    b"userId",
    b"movieId",
    b"timestamp",
    b"qid:1",
    b"#",
    b"2005-02-29",
]
_MARKS = [
    b"\n",
    b"\r\n",
    b"\r",
    b"\t",
    b" ",
    b",",
    b":",
    b"::",
    b"-",
    b'"',
    b"\0",
    b"\x1f",
    b"\xff",
    b"\xef\xbb\xbf",
]
_ENCODINGS = ["utf-16", "utf-16-be", "utf-32", "utf-7", "cp037", "utf-8-sig"]


@st.composite
def spoilt(draw, good):
    """A good file after a few changes: bytes inserted, removed, repeated or flipped, or the end cut off."""
    data = bytearray(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 1, 2, 5, 50])))
        change = draw(st.sampled_from(["put", "put", "replace", "cut", "repeat", "flip", "end"]))
        if change in ("put", "replace"):
            piece = draw(st.one_of(st.sampled_from(_NUMBERS + _ODD + _WORDS + _MARKS), st.binary(max_size=8)))
            data[start : end if change == "replace" else start] = piece
        elif change == "cut":
            del data[start:end]
        elif change == "repeat":
            data[start:start] = bytes(data[start:end]) * draw(st.sampled_from([1, 2, 300]))
        elif change == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif change == "end":
            del data[start:]
    return bytes(data)


def texts(*good):
    """Bytes for a parser of text; some are almost valid."""
    words = st.lists(st.sampled_from(_NUMBERS + _ODD + _WORDS + _MARKS * 3), max_size=40).map(b"".join)
    long = st.tuples(st.sampled_from(_NUMBERS + _MARKS), st.integers(1, 3000)).map(lambda t: t[0] * t[1])
    encoded = st.tuples(st.sampled_from(good), st.sampled_from(_ENCODINGS)).map(
        lambda pair: pair[0].decode("latin-1").encode(pair[1], "replace")
    )
    return st.one_of(spoilt(good), spoilt(good), spoilt(good), words, st.binary(max_size=200), long, encoded)


def packed(*good):
    """Packed texts, most of them damaged before or after they were packed."""
    packers = st.sampled_from([gzip.compress, bz2.compress, lzma.compress])
    whole = st.tuples(packers, texts(*good)).map(lambda pair: pair[0](pair[1]))
    return st.one_of(
        whole, spoilt([pack(text) for text in good for pack in (gzip.compress, bz2.compress, lzma.compress)])
    )


_NAMES = [
    "ratings.dat",
    "u.data",
    "set/ratings.csv",
    "../ratings.dat",
    "/tmp/bilevax-escaped",
    "C:\\x",
    "a/../../b",
    "..",
    "a/",
    ".",
]


def _zip(members, method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data, mode in members:
            info = zipfile.ZipInfo(name)
            info.compress_type, info.external_attr, info.create_system = method, mode << 16, 3
            archive.writestr(info, data)
    return file.getvalue()


def _tar(members, mode):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = (
                kind,
                "/etc/passwd",
                len(data) if kind == tarfile.REGTYPE else 0,
            )
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _members(good, kinds):
    contents = st.one_of(
        st.sampled_from(good), st.binary(max_size=50), st.integers(0, 20).map(lambda n: b"\0" * 2**n)
    )
    one = st.tuples(st.sampled_from(_NAMES), contents, st.sampled_from(kinds))
    return st.lists(one, max_size=3, unique_by=lambda member: member[0])


def zips(*good):
    """Zip archives with members of all kinds, half of them damaged."""
    whole = _zip([("set/ratings.dat", good[0], 0), ("README", b"read me", 0)], zipfile.ZIP_DEFLATED)
    made = st.builds(
        _zip,
        _members(good, [0, 0, 0o100644, 0o120777, 0o020644]),
        st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]),
    )
    return st.one_of(made, spoilt([whole]))


def tars(*good):
    """Tar archives with members of all kinds, half of them damaged."""
    kinds = [
        tarfile.REGTYPE,
        tarfile.REGTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.DIRTYPE,
    ]
    members = [("set/ratings.dat", good[0], tarfile.REGTYPE), ("README", b"read me", tarfile.REGTYPE)]
    whole = [_tar(members, mode) for mode in ("w", "w:gz", "w:bz2", "w:xz")]
    made = st.builds(_tar, _members(good, kinds), st.sampled_from(["w", "w:gz"]))
    return st.one_of(made, spoilt(whole))


def parquets():
    """Parquet files with columns of any names, types and encodings, half of them damaged."""
    numbers, words = pyarrow.array([1, 1, 2]), pyarrow.array(["a", "b", "a"])
    odd = [pyarrow.array([[1], [], [2]]), pyarrow.array([1.5, None, 2]), pyarrow.array(["x" * 70_000] * 3)]
    one = st.tuples(
        st.sampled_from(["user", "item", "rating", "time", "User", "user.x", ""]),
        st.sampled_from([numbers, numbers, words, words, words.dictionary_encode(), *odd]),
    )
    made = st.builds(_parquet, st.lists(one, min_size=1, max_size=5), st.booleans())
    good = [("user", words), ("item", numbers), ("rating", pyarrow.array([1.0, 2.5, 5.0])), ("time", numbers)]
    return st.one_of(made, spoilt([_parquet(good, dictionary) for dictionary in (True, False)]))


def _parquet(columns, dictionary):
    file = io.BytesIO()
    table = pyarrow.Table.from_arrays([array for _, array in columns], names=[name for name, _ in columns])
    parquet.write_table(table, file, use_dictionary=dictionary)
    return file.getvalue()
