"""LIBSVM files: what is read is right, and what is wrong is named with its file and line."""

import bz2
import gzip
import lzma
import os
import shutil

import numpy as np
import pytest

from bilevax.data import DataError, load, read_libsvm

real_data = pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA is not set")
GOOD = b"-1 1:0.5 3:2 \r\n+1 2:-1e-3\n-1\n"


def write(folder, data, name="rows"):
    path = folder / name
    path.write_bytes(data)
    return path


def test_rows_and_labels_are_those_of_the_file(tmp_path):
    rows, labels = read_libsvm(write(tmp_path, GOOD), width=5)
    np.testing.assert_array_equal(
        rows.toarray(), np.array([[0.5, 0, 2, 0, 0], [0, -1e-3, 0, 0, 0], [0, 0, 0, 0, 0]], np.float32)
    )
    assert rows.dtype == np.float32
    assert rows.has_sorted_indices
    assert labels.tolist() == [-1, 1, -1]
    assert labels.dtype == np.int64


def test_width_is_the_highest_index_if_left_out_and_labels_may_be_real(tmp_path):
    rows, labels = read_libsvm(write(tmp_path, b"0.5 1:1 7:1\n-2.25 3:.5"))
    assert rows.shape == (2, 7)
    assert labels.tolist() == [0.5, -2.25]


@pytest.mark.parametrize(("suffix", "pack"), [(".bz2", bz2), (".gz", gzip), (".xz", lzma)])
def test_packed_files_are_unpacked_and_damaged_ones_refused(tmp_path, suffix, pack):
    packed = pack.compress(GOOD * 100)
    rows, _ = read_libsvm(write(tmp_path, packed, f"rows{suffix}"))
    assert rows.shape == (300, 3)
    with pytest.raises(DataError, match=r"cut\.\w+: cannot be read"):
        read_libsvm(write(tmp_path, packed[:-20], f"cut{suffix}"))
    with pytest.raises(DataError, match="cannot be read"):
        read_libsvm(write(tmp_path, GOOD, f"plain{suffix}"))
    with pytest.raises(DataError, match="more than the limit of 1,000 bytes"):
        read_libsvm(tmp_path / f"rows{suffix}", size_limit=1000)


BAD = {
    "empty": (b"", "rows: is empty"),
    "blanks only": (b" \n\n", "rows: is empty"),
    "binary": (b"-1 1:1\n\x00\x01\x02", "rows, line 2: is not plain text"),
    "packed": (b"\x1f\x8b\x08\x00", "rows, line 1: is packed data"),
    "cut after the colon": (b"-1 1:1\n+1 3:1 8:", "rows, line 2: expected index:value, got '8:'"),
    "cut before the colon": (b"-1 1:1\n+1 3:1 8", "rows, line 2: expected index:value, got '8'"),
    "index 0": (b"-1 0:1", "rows, line 1: got index 0, expected indices from 1"),
    "negative index": (b"-1 -3:1", "line 1: expected a whole number from 1 .* as index, got '-3'"),
    "index of a fraction": (b"-1 1.5:1", "as index, got '1.5'"),
    "falling indices": (b"-1 1:1\n-1 3:1 2:1", "line 2: index 2 is not above the one before it"),
    "an index twice": (b"-1 3:1 3:1", "line 1: index 3 is not above"),
    "beyond the width": (b"-1 1:1\n\n".strip() + b"\n-1 9:1", "line 2: got index 9, expected at most 8"),
    "a huge index": (b"-1 99999999999:1", "got '99999999999'"),
    "nan": (b"-1 1:nan", "line 1: expected a finite number after 1:, got 'nan'"),
    "inf": (b"-1 1:inf", "got 'inf'"),
    "overflow": (b"1 1:1\n-1 1:1 2:1e39", "line 2: the value 1e\\+39 of index 2 is too large"),
    "an overflowing label": (b"1e999 1:1", "line 1: the label is too large"),
    "a word as label": (b"yes 1:1", "line 1: expected a number as label, got 'yes'"),
    "labels in a list": (b"1,2 1:1", "expected a number as label, got '1,2'"),
    "qid": (b"1 qid:3 1:1", "line 1: has a qid"),
    "csv": (b"age,sex\n1,2\n", "line 1: expected a number as label, got 'age,sex'"),
    "numbers in csv": (b"1,2,3\n", "expected a number as label, got '1,2,3'"),
    "columns of numbers": (b"1 2 3\n", "expected index:value, got '2'"),
    "html": (b"<!DOCTYPE html>", "expected a number as label, got '<!DOCTYPE'"),
    "a comment": (b"1 1:1 # note", "expected index:value, got '#'"),
    "utf-16": ("1 1:1".encode("utf-16"), "is not plain text"),
    "a blank line": (b"1 1:1\n\n1 1:1\n", "line 2: is blank"),
    "a blank at the start": (b" 1 1:1", "line 1: starts with a blank"),
    "underscores": (b"1 1:1_0", "expected a finite number after 1:, got '1_0'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_refused_with_its_name_and_line(tmp_path, case):
    data, message = BAD[case]
    with pytest.raises(DataError, match=message):
        read_libsvm(write(tmp_path, data), width=8)


def test_error_carries_path_and_line(tmp_path):
    path = write(tmp_path, GOOD + b"x")
    with pytest.raises(DataError) as caught:
        read_libsvm(path)
    assert (caught.value.path, caught.value.line) == (str(path), 4)


def test_long_line_is_refused_wherever_it_stands(tmp_path):
    long = b"1" + b" 1:1" * 300_000
    for data, line in ((long, 1), (GOOD + long + b"\n" + GOOD, 4), (GOOD * 40_000 + long, 120_001)):
        with pytest.raises(DataError, match=f"line {line}: is longer than the limit of 100,000 bytes"):
            read_libsvm(write(tmp_path, data), line_limit=100_000)


def test_blank_line_between_pieces_of_a_large_file_is_refused(tmp_path):
    # Pieces are read by the mebibyte: the blank lines fill one of their own.
    data = b"1 1:1\n" * 1000 + b"\n" * (3 << 20) + b"1 1:1\n"
    with pytest.raises(DataError, match=r"is blank|follows a blank line"):
        read_libsvm(write(tmp_path, data))


def test_missing_file_folder_and_bad_width_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be opened: No such file"):
        read_libsvm(tmp_path / "nothing")
    with pytest.raises(DataError, match="is a folder"):
        read_libsvm(tmp_path)
    with pytest.raises(ValueError, match="width must be a whole number from 1 to 2147483647, got 0"):
        read_libsvm(tmp_path, width=0)


@pytest.mark.parametrize("width", [2**31, 2**32 + 5, 2**64, -1, True, 1.5, "8"])
def test_width_that_32_bits_do_not_hold_is_rejected(tmp_path, width):
    # An index of 3,000,000,000 would wrap to a negative one.
    path = write(tmp_path, b"1 3000000000:1\n")
    with pytest.raises(ValueError, match="width must be a whole number from 1 to 2147483647"):
        read_libsvm(path, width=width)
    with pytest.raises(DataError, match="got index 3000000000, expected at most 2147483647"):
        read_libsvm(path)


def test_largest_index_is_kept(tmp_path):
    path = write(tmp_path, b"1 2147483647:1\n")
    for width in (None, 2**31 - 1, np.int64(2**31 - 1)):
        rows, _ = read_libsvm(path, width=width)
        assert rows.shape == (1, 2**31 - 1)
        assert rows.indices.tolist() == [2**31 - 2]


@real_data
@pytest.mark.parametrize(
    ("name", "rows", "tests", "width"), [("a8a", 22_696, 9_865, 123), ("w8a", 49_749, 14_951, 300)]
)
def test_known_sets_have_their_declared_shape_and_agree_with_scikit_learn(name, rows, tests, width):
    from sklearn.datasets import load_svmlight_file

    data = load(name)
    assert data.X.shape == (rows, width)
    assert data.X_test.shape == (tests, width)
    assert set(np.unique(data.y)) == {-1, 1}
    path = os.path.join(os.environ["BILEVAX_DATA"], "libsvm", f"{name}.t")
    theirs, labels = load_svmlight_file(path, n_features=width, dtype=np.float32)
    assert (data.X_test != theirs).nnz == 0
    np.testing.assert_array_equal(data.y_test, labels)


@real_data
def test_a_copy_with_other_line_ends_is_accepted_and_a_changed_one_is_not(tmp_path, monkeypatch):
    original = os.path.join(os.environ["BILEVAX_DATA"], "libsvm")
    shutil.copytree(original, tmp_path / "libsvm")
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    path = tmp_path / "libsvm" / "a8a.t"
    text = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(b"\n".join(line.rstrip() for line in text.split(b"\n")) + b"\n")
    assert load("a8a").X_test.shape == (9_865, 123)
    path.write_bytes(text.replace(b"5:1", b"4:1", 1))
    with pytest.raises(DataError, match=r"a8a\.t: is not the published a8a\.t"):
        load("a8a")


def test_a_set_that_is_nowhere_is_an_error_without_download(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    monkeypatch.setenv("BILEVAX_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"libsvm/w8a is not at .*, and downloading is switched off"):
        load("w8a", download=False)
    with pytest.raises(DataError, match="no data set for classification is called 'ml-1m'"):
        load("ml-1m")
