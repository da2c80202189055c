"""Interactions from tables with named columns: CSV, TSV or parquet."""

from __future__ import annotations

import codecs
import csv
import io
import re
import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import PurePath
from typing import IO, Any

import numpy as np

from bilevax.data.errors import DataError, decoding_errors, excerpt
from bilevax.data.files import SIZE_LIMIT, read_pieces, read_whole_lines
from bilevax.data.interactions import Columns

_USUAL = {
    "user": ("user", "user_id", "userid", "uid", "customer", "customer_id"),
    "item": ("item", "item_id", "itemid", "iid", "movie", "movie_id", "movieid", "product", "product_id"),
    "rating": ("rating", "ratings", "score", "stars"),
    "time": ("time", "timestamp", "date", "datetime"),
}
_NEEDED = ("user", "item")
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")
_ID_LIMIT = 200  # characters; in an array of ids, each takes the space of the longest
_FLOAT_LIMIT = 3e38
_BATCH = 256  # rows of a parquet file that are decoded before their size is checked


def read_table(
    stream: IO[bytes],
    path: str | PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    size_limit: int = SIZE_LIMIT,
) -> Columns:
    """The columns of a table, whose format is the ending of its file's name: .csv, .tsv, .tab or .parquet.

    Args:
      stream: the file, open for reading.
      path: the file's name, also in errors.
      columns: the table's names of `user`, `item`, `rating` and `time`. For those left out, the usual names
        are tried, in upper or lower case. Without a column of ratings all are 1, without times all are 0.
        Times are whole numbers or dates; dates become seconds since 1970.
      size_limit: most bytes to read, and to decode.

    Raises:
      DataError: a column is missing or occurs twice, or an entry does not fit its column.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError('tables need pandas: pip install "bilevax[data]"') from error
    unknown = set(columns or {}) - set(_USUAL)
    if unknown:
        raise ValueError(f"columns may name user, item, rating and time, got {sorted(unknown)}")
    # "ratings.csv.gz" is a .csv: the stream is unpacked already.
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if ".parquet" in suffixes:
        frame = _parquet(stream, path, columns or {}, size_limit)
    else:
        separator = "\t" if {".tsv", ".tab"} & set(suffixes) else ","
        frame = _delimited(pandas, stream, path, separator, size_limit)
    names = usual_columns(list(frame.columns), columns or {}, path)
    if len(frame) == 0:
        raise DataError("has no rows", path=path)
    taken: dict[str, Any] = {}
    for name, column in names.items():
        taken[name] = frame[column]
        taken[name].attrs = frame.attrs
        _reject(name, taken[name].isna().to_numpy(), taken[name], path, "an entry")
    return Columns(
        _ids("user", taken["user"], path),
        _ids("item", taken["item"], path),
        _ratings(pandas, taken["rating"], path) if "rating" in taken else np.ones(len(frame), np.float32),
        _times(pandas, taken["time"], path) if "time" in taken else np.zeros(len(frame), np.int64),
    )


def _delimited(pandas: Any, stream: IO[bytes], path: Any, separator: str, size_limit: int) -> Any:
    """A frame of strings."""
    pieces = [
        _text(piece, first, path) for first, piece in read_whole_lines(stream, path, size_limit=size_limit)
    ]
    text = b"".join(pieces).replace(b"\r\n", b"\n").rstrip(b"\n").removeprefix(codecs.BOM_UTF8)
    if not text:
        raise DataError("is empty, expected a header and rows", path=path)
    header = text.partition(b"\n")[0]
    with decoding_errors("is not a table", path):
        names = next(csv.reader([header.decode()], delimiter=separator))
        if len(set(names)) < len(names):  # pandas would rename the second
            raise DataError(
                f"expected different names in the header, got {excerpt(header)}", path=path, line=1
            )
        with warnings.catch_warnings():
            # If the first row is longer than the header, pandas warns and drops the rest of it.
            warnings.simplefilter("error")
            frame = pandas.read_csv(
                io.BytesIO(text),
                sep=separator,
                dtype=object,
                na_filter=False,
                index_col=False,
                skip_blank_lines=False,
                lineterminator="\n",
                low_memory=False,
            )
    # With quotes a row may take several lines, and its number is not that of its line.
    frame.attrs["first"] = None if b'"' in text else 2
    return frame


def _text(piece: bytes, first: int, path: Any) -> bytes:
    """A piece of a file, if it is text in UTF-8."""
    if b"\0" in piece:
        line = first + piece.count(b"\n", 0, piece.index(b"\0"))
        raise DataError("is binary, expected text", path=path, line=line)
    try:
        piece.decode()
    except UnicodeDecodeError as error:
        line = first + piece.count(b"\n", 0, error.start)
        got = excerpt(piece[error.start : error.start + 4])
        raise DataError(f"is not UTF-8, got {got}", path=path, line=line) from error
    return piece


def _parquet(stream: IO[bytes], path: Any, columns: Mapping[str, str], size_limit: int) -> Any:
    """A frame of the columns that are needed.

    A parquet file may be far smaller than its contents: a string that repeats is stored once. So a few rows
    are decoded at a time, until they exceed the size limit.
    """
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('parquet needs pyarrow: pip install "bilevax[data]"') from error
    data = b"".join(read_pieces(stream, path, size_limit=size_limit))
    with decoding_errors("is not a parquet table, or damaged", path):
        file = parquet.ParquetFile(io.BytesIO(data))
        chosen = list(usual_columns(file.schema_arrow.names, columns, path).values())
        too_large = DataError(f"holds more than the limit of {size_limit:,} bytes", path=path)
        # Not more of the metadata: if it is damaged, pyarrow may abort the process.
        if 8 * file.metadata.num_rows * len(chosen) > size_limit:
            raise too_large
        batches, size = [], 0
        for batch in file.iter_batches(_BATCH, columns=chosen, use_threads=False):
            size += batch.nbytes
            if size > size_limit:
                raise too_large
            batches.append(batch)
        if not batches:
            raise DataError("has no rows", path=path)
        table = pyarrow.Table.from_batches(batches)
        table.validate(full=True)  # rejects strings that are not UTF-8, which pandas would find later
        # The metadata of pandas are not trusted; without them, an index is a column like any other.
        frame = table.replace_schema_metadata(None).to_pandas()
    frame.attrs["first"] = None
    return frame


def usual_columns(
    present: list[str], columns: Mapping[str, str] | None = None, path: Any = None
) -> dict[str, str]:
    """A table's names of the columns that are needed: {"user": "user_id", …}.

    Args:
      present: the names of the table's columns.
      columns: the names of those that have no usual name.
      path: the file that errors name.

    Raises:
      DataError: there is no column of users or items, or several columns may be meant.
    """
    columns = columns or {}
    names: dict[str, str] = {}
    shown = excerpt(", ".join(present).encode(errors="backslashreplace"), 200)
    for name, usual in _USUAL.items():
        if name in columns:
            if present.count(columns[name]) != 1:
                found = "several columns" if columns[name] in present else "no column"
                raise DataError(f"has {found} {columns[name]!r}; it has {shown}", path=path)
            names[name] = columns[name]
            continue
        fitting = [one for one in present if one.strip().lower() in usual]
        if len(fitting) > 1 or (not fitting and name in _NEEDED):
            problem = "several columns" if fitting else "no column"
            if path is None:
                advice = f"call it {name!r}."
            elif len(present) == 1 and re.search(r"[;|\t]|::", present[0]):
                advice = "does the file use another separator?"
            else:
                advice = f"name it with columns={{{name!r}: …}}."
            raise DataError(
                f"the table has {problem} that may be the {name}; {advice} It has {shown}", path=path
            )
        names |= {name: fitting[0]} if fitting else {}
    return names


def _reject(name: str, bad: np.ndarray, column: Any, path: Any, wanted: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        first = column.attrs.get("first")
        got = excerpt(str(column.iloc[row]).encode(errors="backslashreplace"))
        where = "" if first else f" in row {row + 1}"
        line = row + first if first else None
        raise DataError(f"expected {wanted} as {name}{where}, got {got}", path=path, line=line)


def _ids(name: str, column: Any, path: Any) -> np.ndarray:
    """Whole numbers if all are written as such, else strings: 007 and 7 are different ids then."""
    if column.dtype.kind in "iu":
        return column.to_numpy()
    is_text = np.fromiter((isinstance(one, str) for one in column), bool, len(column))
    _reject(name, ~is_text, column, path, "a whole number or a string")
    code, distinct = column.factorize()
    wrong = np.array([not 0 < len(one) <= _ID_LIMIT for one in distinct], bool)
    _reject(name, wrong[code], column, path, f"an id of 1 to {_ID_LIMIT} characters")
    if all(_WHOLE.fullmatch(one) for one in distinct):
        return np.array([int(one) for one in distinct], np.int64)[code]
    return column.to_numpy(object)


def _converted(name: str, convert: Callable[..., Any], column: Any, path: Any, **options: Any) -> Any:
    """A column of numbers or dates; entries that are none become missing values."""
    with decoding_errors(f"cannot be read as a column of {name}s", path):
        return convert(column, errors="coerce", **options)


def _ratings(pandas: Any, column: Any, path: Any) -> np.ndarray:
    is_time = np.full(len(column), column.dtype.kind in "mM")  # pandas would convert these to numbers
    _reject("rating", is_time, column, path, "a finite number")
    values = _converted("rating", pandas.to_numeric, column, path).to_numpy(np.float64, na_value=np.nan)
    _reject("rating", ~(np.abs(values) < _FLOAT_LIMIT), column, path, "a finite number")
    return values.astype(np.float32)


def _times(pandas: Any, column: Any, path: Any) -> np.ndarray:
    """Whole numbers as they are; dates as seconds since 1970."""
    if column.dtype.kind != "M":
        numbers = _converted("time", pandas.to_numeric, column, path)
        if numbers.dtype.kind in "iu":
            _reject("time", (numbers > 2**62).to_numpy(), column, path, "a whole number below 2^62")
            return numbers.to_numpy(np.int64)
        values = numbers.to_numpy(np.float64, na_value=np.nan)
        if np.isfinite(values).any():
            whole = (np.abs(values) < 2**53) & (values == np.floor(values))
            _reject("time", ~whole, column, path, "a whole number")
            return values.astype(np.int64)
    dates = _converted("time", pandas.to_datetime, column, path, utc=True, format="ISO8601")
    _reject("time", dates.isna().to_numpy(), column, path, "a whole number or a date such as 2005-09-06")
    return dates.dt.tz_localize(None).astype("datetime64[s]").astype(np.int64).to_numpy()
