"""Tables with named columns: any names, ids as strings, dates, and errors that name the line."""

import sys

import numpy as np
import pytest

from bilevax.data import DataError, load_interactions


def load_text(folder, text, name="table.csv", **options):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_interactions(path, **options)


def test_columns_are_found_by_given_names_in_any_order(tmp_path):
    text = "when,stars,film,who,extra\n20,4.5,x,bo,1\n10,3,y,al,2\n"
    columns = {"user": "who", "item": "film", "rating": "stars", "time": "when"}
    table = load_text(tmp_path, text, columns=columns)
    assert table.user_ids[table.user].tolist() == ["bo", "al"]
    assert table.item_ids[table.item].tolist() == ["x", "y"]
    assert table.rating.tolist() == [4.5, 3]
    assert table.time.tolist() == [20, 10]


def test_ratings_and_times_may_be_missing(tmp_path):
    table = load_text(tmp_path, "user,item\n1,5\n1,4\n")
    assert table.rating.tolist() == [1, 1]
    assert table.csr().item.tolist() == [1, 0]


def test_ids_are_numbers_only_if_all_are_written_as_such(tmp_path):
    assert load_text(tmp_path, "user,item\n10,1\n9,1\n").user_ids.tolist() == [9, 10]
    assert load_text(tmp_path, "user,item\n10,1\n010,1\n").user_ids.tolist() == ["010", "10"]
    assert load_text(tmp_path, "user,item\nNA,1\nnan,1\n").user_ids.tolist() == ["NA", "nan"]


def test_dates_become_seconds(tmp_path):
    table = load_text(tmp_path, "user,item,date\n1,1,1970-01-02\n1,2,1970-01-01T00:01:00Z\n")
    assert table.time.tolist() == [86_400, 60]


def test_quotes_a_byte_order_mark_and_other_alphabets_are_understood(tmp_path):
    table = load_text(tmp_path, '\ufeffuser,item\n"a,b",Żółć\n"c ""d""",x\n')
    assert table.user_ids.tolist() == ["a,b", 'c "d"']
    assert table.item_ids.tolist() == ["x", "Żółć"]


BAD = {
    "empty": ("", "table.csv: is empty"),
    "a header only": ("user,item\n", "has no rows"),
    "no item": ("user,thing\n1,2\n", "has no column that may be the item; name it with columns="),
    "another separator": (
        "user;item\n1;2\n",
        "no column that may be the user; does the file use another separator",
    ),
    "two users": ("user,uid,item\n1,2,3\n", "has several columns that may be the user"),
    "a name twice": ("user,item,user\n1,2,3\n", "line 1: expected different names"),
    "a quoted name twice": ('user,item,"user"\n1,2,3\n', "line 1: expected different names"),
    "a name in two cases": ("user,item,User\n1,2,3\n", "has several columns that may be the user"),
    "a huge header": ("user,item," + "x" * 200_000 + "\n1,2,3\n", "is not a table: field larger than"),
    "a short row": (
        "user,item,rating\n1,2,3\n1,3\n",
        "line 3: expected (an entry|a finite number) as rating",
    ),
    "a long row": ("user,item\n1,2\n1,3,4\n", "is not a table: .*line 3"),
    "a long first row": ("user,item\n1,2,3\n1,3\n", "is not a table"),
    "no user": ("user,item\n1,2\n,3\n", "line 3: expected an id of 1 to 200 characters as user, got ''"),
    "a long id": ("user,item\n" + "x" * 201 + ",3\n", "line 2: expected an id of 1 to 200"),
    "a word as rating": ("user,item,rating\n1,2,3\n1,3,good\n", "line 3: expected a finite number as rating"),
    "inf": ("user,item,rating\n1,2,inf\n", "line 2: expected a finite number as rating, got 'inf'"),
    "too large": ("user,item,rating\n1,2,1e39\n", "line 2: expected a finite number as rating"),
    "a fraction as time": ("user,item,time\n1,2,3\n1,3,0.5\n", "line 3: expected a whole number as time"),
    "half dates": ("user,item,time\n1,2,3\n1,3,2005-01-01\n", "line 3: expected a whole number as time"),
    "no date": ("user,item,time\n1,2,2005-01-01\n1,3,soon\n", "line 3: expected a whole number or a date"),
    "a blank line": ("user,item\n1,2\n\n1,3\n", "line 3: expected (an entry|an id)"),
    "latin-1": ("user,item\n1,2\nä,3\n".encode("latin-1"), "line 3: is not UTF-8"),
    "utf-16": ("user,item\n1,2\n".encode("utf-16-le"), "line 1: is binary"),
    "an open quote": ('user,item\n1,"2\n', "is not a table"),
    "a quoted row": ('user,item,rating\n"1",2,x\n', "expected a finite number as rating in row 1, got 'x'"),
    "duplicates": ("user,item\n1,2\n1,2\n", "1 entries repeat a pair"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_table_is_refused(tmp_path, case):
    text, message = BAD[case]
    with pytest.raises(DataError, match=message):
        load_text(tmp_path, text)


def test_columns_that_are_not_there_or_not_known_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no column 'film'; it has 'user, item'"):
        load_text(tmp_path, "user,item\n1,2\n", columns={"item": "film"})
    with pytest.raises(ValueError, match="columns may name user, item, rating and time, got \\['stars'\\]"):
        load_text(tmp_path, "user,item\n1,2\n", columns={"stars": "rating"})


def test_range_of_ratings_is_checked(tmp_path):
    text = "user,item,rating\n1,2,3\n1,3,11\n"
    with pytest.raises(DataError, match=r"got the rating 11 \(entry 2\), expected 0 to 10"):
        load_text(tmp_path, text, rating_range=(0, 10))


def frame():
    import pandas

    return pandas.DataFrame(
        {
            "user": ["bo", "al"],
            "item": [5, 300],
            "rating": np.array([1.5, 2], np.float32),
            "time": pandas.to_datetime(["1970-01-01 00:01:00", "1970-01-02 00:00:00"]),
        }
    )


def check_frame(table):
    assert table.user_ids[table.user].tolist() == ["bo", "al"]
    assert table.item_ids[table.item].tolist() == [5, 300]
    assert table.rating.tolist() == [1.5, 2]
    assert table.time.tolist() == [60, 86_400]


def test_parquet_holds_the_same_as_csv(tmp_path):
    pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    frame().to_parquet(tmp_path / "table.parquet")
    check_frame(load_interactions(tmp_path / "table.parquet"))
    with pytest.raises(DataError, match="holds more than the limit of"):
        load_interactions(tmp_path / "table.parquet", size_limit=10)
    data = (tmp_path / "table.parquet").read_bytes()
    for bad in (b"", data[:100], b"x" * 500):
        with pytest.raises(DataError, match=r"bad\.parquet: is not a parquet table"):
            load_text(tmp_path, bad, "bad.parquet")


def write_parquet(folder, columns, **options):
    """A parquet file with these columns, pairs of a name and an Arrow array."""
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    from pyarrow import parquet

    path = folder / "table.parquet"
    names, arrays = zip(*columns, strict=True)
    parquet.write_table(pyarrow.Table.from_arrays(list(arrays), names=list(names)), path, **options)
    return path


def arrow(values, kind=None):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    return pyarrow.array(values, kind)


@pytest.mark.parametrize("columns", [None, {"user": "user"}])
def test_parquet_with_two_columns_of_a_name_is_rejected(tmp_path, columns):
    path = write_parquet(tmp_path, [(name, arrow([1, 2])) for name in ("user", "item", "user")])
    with pytest.raises(DataError, match="has several columns"):
        load_interactions(path, columns=columns)


ENCODINGS = ["dictionary", "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_size_limit_holds_for_strings_that_a_parquet_file_stores_once(tmp_path, encoding):
    # Some kilobytes on disk, 100 MB in memory.
    options = {"use_dictionary": encoding == "dictionary", "compression": "zstd", "store_schema": False}
    if encoding != "dictionary":
        options["column_encoding"] = {"user": encoding, "item": "PLAIN"}
    columns = [("user", arrow(["x" * 100_000] * 1000)), ("item", arrow(range(1000)))]
    path = write_parquet(tmp_path, columns, **options)
    assert path.stat().st_size < 200_000
    with pytest.raises(DataError, match="holds more than the limit of 1,000,000 bytes"):
        load_interactions(path, size_limit=1_000_000)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_strings_of_a_parquet_file_are_read_in_any_encoding(tmp_path, encoding):
    options = {"use_dictionary": encoding == "dictionary"}
    if encoding != "dictionary":
        options["column_encoding"] = {"user": encoding, "item": "PLAIN"}
    names = [f"user {i % 7}" for i in range(1000)]
    path = write_parquet(tmp_path, [("user", arrow(names)), ("item", arrow(range(1000)))], **options)
    table = load_interactions(path)
    assert table.user_ids[table.user].tolist() == names
    assert table.item.tolist() == list(range(1000))


def test_parquet_that_declares_too_many_rows_is_rejected_unread(tmp_path):
    # A column of equal numbers takes a few bytes, however long it is.
    zeros = arrow(np.zeros(1_000_000, np.int8))
    path = write_parquet(tmp_path, [("user", zeros), ("item", zeros)])
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="holds more than the limit of 1,000,000 bytes"):
        load_interactions(path, size_limit=1_000_000)


def test_columns_that_are_not_needed_do_not_count(tmp_path):
    columns = [("user", arrow([1, 2])), ("item", arrow([1, 2])), ("text", arrow(["x" * 100_000] * 2))]
    path = write_parquet(tmp_path, columns, compression="zstd")
    assert len(load_interactions(path, size_limit=50_000)) == 2


def test_index_of_a_frame_is_a_column_of_its_parquet_file(tmp_path):
    pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    frame().set_index("user").to_parquet(tmp_path / "table.parquet")
    check_frame(load_interactions(tmp_path / "table.parquet"))


def test_metadata_of_pandas_in_a_parquet_file_are_not_parsed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"user": [1, 2], "item": [1, 2]})
    deep = table.replace_schema_metadata({"pandas": "[" * 100_000})
    parquet.write_table(deep, tmp_path / "table.parquet")
    assert len(load_interactions(tmp_path / "table.parquet")) == 2


def odd_columns():
    """Arrow arrays that no column should be."""
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    offsets = pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1]
    return {
        "bytes": arrow([b"a", b"b"]),
        "lists": arrow([[1], [2]]),
        "structs": arrow([{"x": 1}, {"x": 2}]),
        "maps": arrow([[(1, 2)], [(3, 4)]], pyarrow.map_(pyarrow.int64(), pyarrow.int64())),
        "times of day": arrow([1, 2], pyarrow.time32("s")),
        "nothing": pyarrow.nulls(2),
        "no UTF-8": pyarrow.Array.from_buffers(
            pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")]
        ),
        "words": arrow(["good", "bad"]),
    }


@pytest.mark.parametrize("role", ["user", "item", "rating", "time"])
@pytest.mark.parametrize(
    "kind", ["bytes", "lists", "structs", "maps", "times of day", "nothing", "no UTF-8", "words"]
)
def test_columns_of_any_other_type_are_data_errors(tmp_path, role, kind):
    if kind == "words" and role in ("user", "item"):
        return  # words are ids
    columns = dict.fromkeys(("user", "item", "rating", "time"), arrow([1, 2]))
    path = write_parquet(tmp_path, (columns | {role: odd_columns()[kind]}).items())
    with pytest.raises(DataError):
        load_interactions(path)


@pytest.mark.parametrize("kind", ["timestamp", "duration"])
def test_times_are_no_ratings(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    times = arrow([1, 2], getattr(pyarrow, kind)("s"))
    path = write_parquet(tmp_path, [("user", arrow([1, 2])), ("item", arrow([1, 2])), ("rating", times)])
    with pytest.raises(DataError, match="expected a finite number as rating in row 1"):
        load_interactions(path)


def test_ids_that_differ_in_a_nul_are_not_merged(tmp_path):
    path = write_parquet(tmp_path, [("user", arrow(["a", "a\0"])), ("item", arrow([1, 1]))])
    with pytest.raises(DataError, match=r"has the user id a\\x00, which ends in a NUL character"):
        load_interactions(path)


def load_frame(folder, monkeypatch, given):
    """What `load_interactions` makes of the frame that a parquet file holds."""

    def read(*_):
        given.attrs["first"] = None
        return given

    monkeypatch.setattr("bilevax.data.tables._parquet", read)
    return load_text(folder, b"PAR1", "table.parquet")


def test_typed_columns_are_taken_as_they_are(tmp_path, monkeypatch):
    import pandas

    check_frame(load_frame(tmp_path, monkeypatch, frame()))
    zoned = frame()
    zoned["time"] = zoned["time"].dt.tz_localize("UTC").dt.tz_convert("Europe/Berlin")
    check_frame(load_frame(tmp_path, monkeypatch, zoned))
    typed = frame().astype({"user": "string", "item": "Int64", "rating": "Float32"})
    typed["time"] = pandas.array([60, 86_400], dtype="int32")
    check_frame(load_frame(tmp_path, monkeypatch, typed))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("user", ["bo", None], "expected an entry as user in row 2"),
        ("user", [1.5, 2.5], "expected a whole number or a string as user in row 1, got '1.5'"),
        ("item", [b"a", b"b"], "expected a whole number or a string as item in row 1"),
        ("rating", [1.0, np.inf], "expected a finite number as rating in row 2"),
        ("rating", [1.0, np.nan], "expected an entry as rating in row 2"),
        ("time", [1.0, 2.5], "expected a whole number as time in row 2"),
        (
            "time",
            [np.datetime64("NaT", "D"), np.datetime64("2005-01-01")],
            "expected an entry as time in row 1",
        ),
    ],
)
def test_bad_entries_of_typed_columns_are_refused(tmp_path, monkeypatch, column, values, message):
    bad = frame()
    bad[column] = values
    with pytest.raises(DataError, match=message):
        load_frame(tmp_path, monkeypatch, bad)


def test_table_without_pandas_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'tables need pandas: pip install "bilevax\[data\]"'):
        load_text(tmp_path, "user,item\n1,2\n")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'parquet needs pyarrow: pip install "bilevax\[data\]"'):
        load_text(tmp_path, b"PAR1", "table.parquet")
