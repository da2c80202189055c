"""Interactions: the formats, the codes, the duplicates, the order of time and the splits."""

import os
import zipfile

import numpy as np
import pytest

from bilevax.data import (
    DataError,
    UserRows,
    load_interactions,
    make_interactions,
    split_last,
    split_ratio,
    split_time,
)

# user, item, rating, time; ids with holes
ROWS = [(7, 300, 4, 50), (2, 300, 5, 10), (7, 12, 1, 20), (2, 12, 3, 11), (7, 44, 2, 20)]


def text_of(separator, header=""):
    return header + "".join(separator.join(map(str, row)) + "\n" for row in ROWS)


FILES = {
    "u.data": text_of("\t"),
    "ratings.dat": text_of("::"),
    "ratings.csv": text_of(",", "userId,movieId,rating,timestamp\n"),
    "other.csv": text_of(",", "user,item,rating,time\n"),
    "other.tsv": text_of("\t", "User_ID\titem_id\trating\ttimestamp\n"),
}


def check(table):
    assert table.user_ids.tolist() == [2, 7]
    assert table.item_ids.tolist() == [12, 44, 300]
    got = zip(table.user_ids[table.user], table.item_ids[table.item], table.rating, table.time, strict=True)
    assert [tuple(map(int, row)) for row in got] == ROWS
    assert [a.dtype for a in (table.user, table.item, table.rating, table.time)] == [
        np.int32,
        np.int32,
        np.float32,
        np.int64,
    ]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_table(tmp_path, name, ends):
    path = tmp_path / name
    path.write_bytes(FILES[name].replace("\n", ends).encode())
    check(load_interactions(path))
    path.write_bytes(FILES[name].rstrip("\n").encode())
    check(load_interactions(path))


@pytest.mark.parametrize("name", FILES)
def test_formats_are_found_packed_in_folders_and_in_archives(tmp_path, name):
    import gzip

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.txt").write_text("read me")
    (folder / name).write_text(FILES[name])
    check(load_interactions(folder))
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(FILES[name].encode()))
    check(load_interactions(tmp_path / f"{name}.gz"))
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.writestr("set/README.txt", "read me")
        archive.writestr(f"set/{name}", FILES[name])
    check(load_interactions(tmp_path / "set.zip"))


NETFLIX = {
    "combined_data_1.txt": "300:\n7,4,2005-09-06\n2,5,1999-12-31\n12:\n7,1,2004-02-29\n",
    "combined_data_2.txt": "44:\n7,2,2005-01-01\n",
}


def check_netflix(table):
    assert table.user_ids[table.user].tolist() == [7, 2, 7, 7]
    assert table.item_ids[table.item].tolist() == [300, 300, 12, 44]
    assert table.rating.tolist() == [4, 5, 1, 2]
    days = ["2005-09-06", "1999-12-31", "2004-02-29", "2005-01-01"]
    assert table.time.astype("datetime64[s]").astype("datetime64[D]").astype(str).tolist() == days


def test_netflix_files_are_read_together(tmp_path):
    for name, text in NETFLIX.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "probe.txt").write_text("1:\n30878\n")
    check_netflix(load_interactions(tmp_path))
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name, text in NETFLIX.items():
            archive.writestr(name, text.replace("\n", "\r\n"))
    check_netflix(load_interactions(tmp_path / "archive.zip"))


def test_netflix_training_set_has_a_file_per_movie(tmp_path):
    folder = tmp_path / "training_set"
    folder.mkdir()
    (folder / "mv_0000001.txt").write_text("1:\n7,4,2005-09-06\n2,5,1999-12-31")
    (folder / "mv_0000002.txt").write_text("2:\n7,1,2004-02-29\n")
    table = load_interactions(tmp_path)
    assert table.item_ids[table.item].tolist() == [1, 1, 2]


def test_many_movies_over_several_pieces_keep_their_ratings(tmp_path):
    # More than the four mebibytes that are read at once, so that pieces end inside of movies.
    movies = np.arange(1, 301)
    lines = [
        f"{m}:\n" + "".join(f"{u},{1 + (u * m) % 5},2005-01-01\n" for u in range(1, 1001)) for m in movies
    ]
    (tmp_path / "combined_data_1.txt").write_text("".join(lines))
    table = load_interactions(tmp_path / "combined_data_1.txt")
    assert len(table) == 300_000
    user, item = table.user_ids[table.user], table.item_ids[table.item]
    np.testing.assert_array_equal(item, np.repeat(movies, 1000))
    np.testing.assert_array_equal(table.rating, 1 + (user * item) % 5)


BAD = {
    "empty": ("u.data", "", "u.data: is empty"),
    "another separator": ("u.data", "1,2,3,4\n", "line 1: expected 'user TAB item TAB rating TAB time'"),
    "a single colon": ("ratings.dat", "1::2::3::4\n1:2:3:4\n", "line 2: expected 'user :: item"),
    "tabs in .dat": ("ratings.dat", "1\t2\t3\t4\n", "line 1: expected 'user ::"),
    "another header": ("ratings.csv", "a,b,c,d\n1,2,3,4\n", "line 1: expected the header 'userId,movieId"),
    "too few fields": ("u.data", "1\t2\t3\t4\n1\t2\t3\n1\t2\t3\t4\n", "line 2: expected"),
    "too many fields": ("u.data", "1\t2\t3\t4\n1\t2\t3\t4\t5\n", "line 2: expected"),
    "cut off": ("ratings.dat", "1::2::3::4\n1::2::", "line 2: expected"),
    "a word": ("u.data", "1\t2\t3\t4\nbo\t2\t3\t4\n", "line 2: expected a whole number .* as user, got 'bo'"),
    "a sign": ("u.data", "-1\t2\t3\t4\n", "line 1: expected a whole number .* as user, got '-1'"),
    "two dots": ("u.data", "1\t2\t3.5.1\t4\n", "expected a decimal number .* as rating, got '3.5.1'"),
    "only a dot": ("u.data", "1\t2\t.\t4\n", "expected a decimal number .* as rating, got '.'"),
    "nan": ("u.data", "1\t2\tnan\t4\n", "as rating, got 'nan'"),
    "a huge number": ("u.data", "1" * 19 + "\t2\t3\t4\n", "whole number of at most 18 digits as user"),
    "a rating out of range": (
        "ratings.dat",
        "1::2::3::4\n1::3::6::4\n",
        "line 2: got the rating 6, expected 0.5 to 5",
    ),
    "a blank line": ("u.data", "1\t2\t3\t4\n\n1\t3\t3\t4\n", "line 2: expected"),
    "binary": ("u.data", "1\t2\t3\t4\n\0\1\2\n", "line 2: expected"),
    "a control character": ("ratings.dat", "1::2::3::4\n1\x1f3::3::4\n", "line 2: holds a control character"),
    "no header": ("combined_data_1.txt", "7,4,2005-09-06\n", "line 1: expected 'movie:' before the first"),
    "a bad movie": ("combined_data_1.txt", "x:\n7,4,2005-09-06\n", "line 1: expected 'movie:' with a whole"),
    "no ratings": ("combined_data_1.txt", "1:\n2:\n", "holds no rating"),
    "30 February": (
        "combined_data_1.txt",
        "1:\n7,4,2005-02-30\n",
        "line 2: expected a date .* got 2005-2-30",
    ),
    "month 13": ("combined_data_1.txt", "1:\n7,4,2005-13-01\n", "line 2: expected a date"),
    "other dashes": ("combined_data_1.txt", "1:\n7-4-2005,09,06\n", "line 2: expected 'user , rating ,"),
    "rating 0": (
        "combined_data_1.txt",
        "1:\n7,4,2005-01-01\n2:\n8,0,2005-01-01\n",
        "line 4: got the rating 0",
    ),
    "an unknown kind": ("notes.txt", "1 2 3\n", "notes.txt: has no known format"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_refused_with_its_name_and_line(tmp_path, case):
    name, text, message = BAD[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_interactions(tmp_path / name)


def test_places_without_one_table_are_refused(tmp_path):
    with pytest.raises(
        DataError, match="nowhere: no such file, and no data set of that name; known are ml-100k"
    ):
        load_interactions(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no table of ratings"):
        load_interactions(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(FILES["other.csv"])
    with pytest.raises(DataError, match=r"holds several tables, expected one: a.csv, b.csv"):
        load_interactions(tmp_path)


def test_known_set_with_other_counts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").write_text(FILES["u.data"])
    with pytest.raises(DataError, match="ml-100k: has 2 users, expected 943 in ml-100k"):
        load_interactions("ml-100k")


@pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA is not set")
def test_movielens_1m_has_its_counts_and_splits_by_the_last_five():
    table = load_interactions("ml-1m")
    assert (table.users, table.items, len(table)) == (6_040, 3_706, 1_000_209)
    parts = split_last(table)
    assert [len(part) for part in (parts.train, parts.dev, parts.test)] == [939_809, 30_200, 30_200]
    assert (parts.dev.counts == 5).all()


DUPLICATED = {"user": [1, 1, 1, 2], "item": [5, 5, 5, 5], "rating": [1, 2, 3, 4], "time": [10, 30, 10, 0]}


def test_duplicates_are_an_error_or_one_of_them_is_kept():
    with pytest.raises(DataError, match=r"2 entries repeat .* user 1 and item 5 \(entries 1 and 2\)"):
        make_interactions(**DUPLICATED)
    assert make_interactions(**DUPLICATED, duplicates="first").rating.tolist() == [1, 4]
    assert make_interactions(**DUPLICATED, duplicates="last").rating.tolist() == [2, 4]
    with pytest.raises(ValueError, match="duplicates must be"):
        make_interactions(**DUPLICATED, duplicates="any")


def test_last_of_duplicates_at_the_same_time_is_the_later_entry():
    table = make_interactions([1, 1], [5, 5], [1, 2], [0, 0], duplicates="last")
    assert table.rating.tolist() == [2]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64])
def test_ids_of_any_width_become_codes(kind):
    ids = np.array([127, -128 if kind == np.int8 else 0, 3], kind)
    table = make_interactions(ids, [1, 2, 3])
    assert table.user_ids[table.user].tolist() == ids.tolist()
    assert table.at_least(1).user_ids.tolist() == sorted(ids.tolist())


@pytest.mark.parametrize("ids", [[5, 10**15, -3, 5], ["b", "ü", "a", "b"], [0, 2, 1, 0]])
def test_ids_of_any_kind_become_codes_in_ascending_order(ids):
    table = make_interactions(ids, [1, 2, 3, 4])
    assert table.user_ids.tolist() == sorted(set(ids))
    assert table.user_ids[table.user].tolist() == ids


MALFORMED = {
    "lengths": (dict(user=[1, 2], item=[1]), "columns of one length, at least 1: item has shape"),
    "nothing": (dict(user=[], item=[]), "at least 1: user has shape"),
    "fractions as ids": (
        dict(user=[0.5], item=[1]),
        "needs whole numbers or strings as user ids, got float64",
    ),
    "ids of 64 bits": (
        dict(user=np.array([2**63], np.uint64), item=[1]),
        "has the user id 9223372036854775808, expected less than 2.63",
    ),
    "mixed ids": (dict(user=np.array([1, "a"], object), item=[1, 2]), "as user ids, got object"),
    "nan rating": (
        dict(user=[1], item=[1], rating=[np.nan]),
        "got the rating nan .entry 1., expected a finite",
    ),
    "range": (
        dict(user=[1], item=[1], rating=[9], rating_range=(1, 5)),
        "rating 9 .entry 1., expected 1 to 5",
    ),
    "fractions as times": (dict(user=[1], item=[1], time=[0.5]), "whole numbers as times"),
    "words as ratings": (dict(user=[1], item=[1], rating=["good"]), "needs numbers as ratings"),
    "times of 64 bits": (
        dict(user=[1], item=[1], time=np.array([2**63], np.uint64)),
        "has the time 9223372036854775808, expected less than 2.63",
    ),
    "lists of different lengths": (dict(user=[[1], [1, 2]], item=[1, 2]), "needs a column .* as user"),
    "numbers of any size": (dict(user=[2**70], item=[1]), "as user ids, got object"),
    "a huge rating": (dict(user=[1], item=[1], rating=[1e300]), "got the rating inf"),
    "a NUL at the end": (dict(user=np.array(["a\0"], object), item=[1]), "ends in a NUL character"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_columns_are_refused(case):
    columns, message = MALFORMED[case]
    with pytest.raises(DataError, match=message):
        make_interactions(**columns)


@pytest.mark.parametrize("ids", [[2**31, 2**32, 2**31 - 1], [2**62, -(2**63), 2**31], [2**40, 2**40 + 1, 0]])
def test_ids_above_32_bits_do_not_wrap(ids):
    table = make_interactions(ids, ids)
    assert table.user_ids[table.user].tolist() == ids
    assert table.item_ids[table.item].tolist() == ids
    assert table.at_least(1).item_ids.tolist() == sorted(ids)


def rows_with(**changes):
    arrays = {"offsets": [0, 2, 3], "item": [0, 1, 1], "rating": [1, 1, 1], "time": [0, 0, 0]}
    return UserRows(**{name: np.array(values) for name, values in (arrays | changes).items()}, items=2)


BAD_ROWS = {
    "offsets that wrap": ({"offsets": [0, 2, 2**32 + 3]}, "needs offsets that ascend from 0 to the 3"),
    "descending offsets": ({"offsets": np.array([0, 4, 3], np.uint64)}, "needs offsets that ascend"),
    "offsets from 1": ({"offsets": [1, 2, 3]}, "needs offsets that ascend from 0"),
    "no offsets": ({"offsets": np.zeros(0, int)}, "needs offsets that ascend from 0"),
    "offsets of another kind": ({"offsets": [0.0, 2.0, 3.0]}, "needs offsets that ascend"),
    "an item that wraps": (
        {"item": [0, 1, 2**32]},
        "codes of items from 0 to 1, got 0 to 4,294,967,296",
    ),
    "a negative item": ({"item": [0, 1, -1]}, "needs codes of items from 0 to 1, got -1 to 1"),
    "too few times": ({"time": [0, 0]}, "needs 3 codes of items, ratings and times"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_do_not_fit_together_are_rejected(case):
    changes, message = BAD_ROWS[case]
    assert rows_with().counts.tolist() == [2, 1]
    with pytest.raises(DataError, match=message):
        rows_with(**changes)


def random_table(seed=0, users=40, items=60, count=800):
    random = np.random.default_rng(seed)
    pairs = random.choice(users * items, count, replace=False)
    times = random.integers(0, 50, count)  # many ties
    return make_interactions(pairs // items, pairs % items, random.integers(1, 6, count), times)


def test_rows_are_in_order_of_time_and_ties_in_order_of_the_table():
    table = random_table()
    rows = table.csr()
    for user in range(table.users):
        mine = np.flatnonzero(table.user == user)
        expected = mine[np.argsort(table.time[mine], kind="stable")]
        span = slice(rows.offsets[user], rows.offsets[user + 1])
        np.testing.assert_array_equal(rows.item[span], table.item[expected])
        np.testing.assert_array_equal(rows.rating[span], table.rating[expected])
    assert rows.offsets.dtype == np.int32


def test_times_of_any_size_are_ordered():
    far = [2**62, -(2**62), 0]
    assert make_interactions([0, 0, 0], [0, 1, 2], time=far).csr().item.tolist() == [1, 2, 0]


def rows_of(part):
    return {(int(u), int(i)) for u, i in zip(part.user, part.item, strict=True)}


def check_parts(table, parts):
    sets = [rows_of(part) for part in (parts.train, parts.dev, parts.test)]
    assert sum(map(len, sets)) == len(sets[0] | sets[1] | sets[2])
    for part in (parts.train, parts.dev, parts.test):
        assert (part.users, part.items) == (table.users, table.items)
        assert part.offsets[0] == 0
        assert part.offsets[-1] == len(part)
    return sets


def test_split_last_takes_the_last_of_every_user():
    table = random_table().at_least(6)
    parts = split_last(table, k_dev=2, k_test=3)
    assert sum(map(len, check_parts(table, parts))) == len(table)
    rows = table.csr()
    for u in range(table.users):
        mine = rows.item[rows.offsets[u] : rows.offsets[u + 1]]
        assert (
            parts.test.item[parts.test.offsets[u] : parts.test.offsets[u + 1]].tolist() == mine[-3:].tolist()
        )
        assert (
            parts.dev.item[parts.dev.offsets[u] : parts.dev.offsets[u + 1]].tolist() == mine[-5:-3].tolist()
        )


def test_short_users_are_named_dropped_or_left_in_train():
    table = make_interactions(["al", "al", "al", "bo", "cy"], [1, 2, 3, 1, 9])
    with pytest.raises(DataError, match=r"2 of 3 users have fewer than the 3 interactions .*: bo, cy"):
        split_last(table, 1, 1)
    parts = split_last(table, 1, 1, short="train")
    assert parts.train.counts.tolist() == [1, 1, 1]
    assert parts.test.counts.tolist() == [1, 0, 0]
    kept = table.at_least(3)
    assert (kept.user_ids.tolist(), kept.item_ids.tolist()) == (["al"], [1, 2, 3])
    with pytest.raises(DataError, match="no user has at least 4"):
        table.at_least(4)
    with pytest.raises(DataError, match="3 of 3 users"):
        split_last(table, 3, 3, short="train")


@pytest.mark.parametrize("seed", [None, 0])
def test_split_ratio_takes_the_fractions_of_every_user(seed):
    table = random_table()
    parts = split_ratio(table, dev=0.1, test=0.3, seed=seed)
    assert sum(map(len, check_parts(table, parts))) == len(table)
    counts = table.csr().counts
    np.testing.assert_array_equal(parts.test.counts, np.floor(counts * 0.3 + 1e-9))
    np.testing.assert_array_equal(parts.dev.counts, np.floor(counts * 0.1 + 1e-9))
    if seed is None:
        for u in range(table.users):
            ends = parts.train.offsets[u + 1], parts.test.offsets[u]
            if parts.test.counts[u]:
                assert parts.train.time[ends[0] - 1] <= parts.test.time[ends[1]]


def test_split_time_divides_at_two_moments():
    table = random_table()
    parts = split_time(table, 20, 40)
    check_parts(table, parts)
    assert (
        parts.train.time.max()
        < 20
        <= parts.dev.time.min()
        <= parts.dev.time.max()
        < 40
        <= parts.test.time.min()
    )


def test_split_time_drops_or_keeps_users_without_training_entries():
    table = make_interactions([0, 0, 0, 1, 1], [0, 1, 2, 0, 1], time=[0, 1, 2, 1, 2])
    assert split_time(table, 1, 2).test.counts.tolist() == [1, 0]
    assert split_time(table, 1, 2, cold="keep").test.counts.tolist() == [1, 1]


EMPTY = {
    "no dev": (
        lambda t: split_ratio(t, dev=0.001),
        DataError,
        "no user has enough interactions for a dev part",
    ),
    "no test": (lambda t: split_time(t, 10, 1000), DataError, "the test part would be empty"),
    "no train": (lambda t: split_time(t, -5, 10), DataError, "the train part would be empty"),
    "moments": (lambda t: split_time(t, 10, 10), ValueError, "dev_from must be before test_from"),
    "fractions": (lambda t: split_ratio(t, 0.5, 0.5), ValueError, r"dev \+ test must be below 1"),
    "a negative number": (lambda t: split_last(t, -1), ValueError, "k_dev must be a whole number from 0"),
    "an unknown choice": (lambda t: split_last(t, short="drop"), ValueError, "short must be"),
    "another choice": (lambda t: split_time(t, 1, 2, cold="no"), ValueError, "cold must be"),
    "a word as number": (lambda t: split_last(t, "5"), ValueError, "k_dev must be a whole number from 0"),
    "a word as moment": (lambda t: split_time(t, "2005", 3), ValueError, "dev_from must be a number"),
    "a word as fraction": (lambda t: split_ratio(t, "0.1"), ValueError, "dev must be a number from 0 to 1"),
    "a negative seed": (lambda t: split_ratio(t, seed=-1), ValueError, "seed must be a whole number from 0"),
    "a word as count": (lambda t: t.at_least("5"), ValueError, "count must be a whole number from 0"),
    "a fraction of 2": (lambda t: split_ratio(t, 2), ValueError, "dev must be a number from 0 to 1"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_empty_and_impossible_splits_are_refused(case):
    split, error, message = EMPTY[case]
    with pytest.raises(error, match=message):
        split(random_table())
