"""Saved recommenders: damaged, tampered and hostile files raise ValueError; writing touches no other file."""

from __future__ import annotations

import json
import os
import stat
import zipfile

import numpy as np
import pytest

from bilevax.applications.ranking import Ratings, TopKRecommender
from bilevax.applications.ranking.array_file import load_arrays, save_arrays
from bilevax.data import generate


@pytest.fixture(scope="module")
def fitted():
    table = generate.interactions(12, 20, 100, seed=0).table
    settings = {"users_per_step": 6, "positives": 2, "negatives": 4, "cutoff": 5}
    recommender = TopKRecommender("softmax", model="mf", width=2, epochs=1, held_out=0, settings=settings)
    return recommender.fit(table, progress=None)


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    """The bytes, the note and the arrays of a saved recommender."""
    path = tmp_path_factory.mktemp("saved") / "recommender.npz"
    fitted.save(path)
    return path.read_bytes(), *load_arrays(path)


def test_a_saved_file_is_a_plain_npz(saved, tmp_path):
    (tmp_path / "a.npz").write_bytes(saved[0])
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert set(file.files) == {"about.json", *saved[2]}
        for name, array in saved[2].items():
            np.testing.assert_array_equal(file[name], array)


def test_a_flipped_bit_anywhere_is_found(saved, tmp_path):
    random, path = np.random.default_rng(0), tmp_path / "a.npz"
    for place in range(0, len(saved[0]), 3):
        damaged = bytearray(saved[0])
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"must be a file that save\(\) wrote"):
            TopKRecommender.load(path)
    assert place > 2000


def test_missing_added_and_swapped_bytes_are_found(saved, tmp_path):
    random, path = np.random.default_rng(1), tmp_path / "a.npz"
    whole = saved[0]
    for _ in range(100):
        first, second = sorted(random.integers(0, len(whole), 2))
        for damaged in (
            whole[:first],
            whole[first + 1 :],
            whole[:first] + whole[second + 1 :],
            whole[:first] + bytes(3) + whole[first:],
            random.bytes(int(second)),
        ):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"must be a file that save\(\) wrote"):
                TopKRecommender.load(path)


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


TAMPERED_ARRAYS = {
    "offsets descend": {"offsets": lambda a: changed(a, 3, a[2] - 1)},
    "offsets skip a user": {"offsets": lambda a: changed(a, 3, a[2])},
    "offsets end early": {"offsets": lambda a: changed(a, -1, a[-1] - 1)},
    "offsets start late": {"offsets": lambda a: changed(a, 0, 1)},
    "offsets are too few": {"offsets": lambda a: a[1:]},
    "offsets are unsigned": {"offsets": lambda a: a.astype(np.uint32)},
    "offsets are floats": {"offsets": lambda a: a.astype(float)},
    "items are out of range": {"items": lambda a: changed(a, 2, 10**6)},
    "items are negative": {"items": lambda a: changed(a, 0, -1)},
    "items are unsorted": {"items": lambda a: changed(changed(a, 0, a[1]), 1, a[0])},
    "an item occurs twice": {"items": lambda a: changed(a, 1, a[0])},
    "items are wide integers": {"items": lambda a: a.astype(np.int64)},
    "items are a matrix": {"items": lambda a: a[None]},
    "users are unsorted": {"user_ids": lambda a: a[::-1]},
    "a user occurs twice": {"user_ids": lambda a: changed(a, 1, a[0])},
    "users are too few": {"user_ids": lambda a: a[1:]},
    "users are none": {"user_ids": lambda a: a[:0]},
    "users are floats": {"user_ids": lambda a: a.astype(float)},
    "users are a number": {"user_ids": lambda a: a[0]},
    "items have too few ids": {"item_ids": lambda a: a[:-1]},
    "items have ids of bytes": {"item_ids": lambda a: a.astype("S8")},
    "a parameter is not a number": {"x/user": lambda a: changed(a, (0, 0), np.nan)},
    "a parameter is infinite": {"x/bias": lambda a: changed(a, 0, np.inf)},
    "a parameter has another shape": {"x/item": lambda a: a[:, :1]},
    "parameters are integers": {"x/bias": lambda a: a.astype(int)},
    "parameters are missing": {"x/bias": lambda a: None},
    "items are missing": {"items": lambda a: None},
    "there is another array": {"extra": lambda a: np.zeros(3)},
}


@pytest.mark.parametrize("change", TAMPERED_ARRAYS.values(), ids=TAMPERED_ARRAYS)
def test_arrays_that_do_not_fit_together_are_rejected(saved, tmp_path, change):
    """The checksum is right: somebody has written the file anew."""
    _, note, arrays = saved
    arrays = arrays | {name: new(arrays.get(name)) for name, new in change.items()}
    save_arrays(tmp_path / "a.npz", note, {n: a for n, a in arrays.items() if a is not None})
    with pytest.raises(ValueError, match=r"a\.npz"):
        TopKRecommender.load(tmp_path / "a.npz")


TAMPERED_NOTES = [
    {"arguments": []},
    {"arguments": {"magic": 1}},
    {"arguments": {"method": ["song"]}},
    {"arguments": {"model": {}}},
    {"arguments": {"model": "neumf", "width": 2}},
    {"arguments": {"model": "mf", "width": 3}},
    {"arguments": {"model": "mf", "width": 10**30}},
    {"arguments": {"model": "mf", "width": "2"}},
    {"arguments": {"model": "mf", "width": 2, "seed": 10**30}},
    {"arguments": {"model": "mf", "width": 2, "settings": [1]}},
    {"arguments": {"model": "mf", "width": 2, "settings": {"lr": 1}}},
    {"arguments": {"model": "mf", "width": 2, "settings": {"alpha": [[1], 2]}}},
    {"arguments": {"model": "mf", "width": 2, "watch": "ndcg@" + "9" * 5000}},
    {"arguments": {"model": "mf", "width": 2, "watch": "ndcg@²"}},
    {"best_epoch": None},
    {"best_epoch": -1.0},
    {"best_epoch": float("nan")},
    {"best_epoch": 10**400},
    {"best_epoch": {}},
    {"outcome": "superb"},
    {"outcome": []},
    {"history": {}},
    {"history": [1]},
    {"history": [{"step": "1"}]},
    {"history": [{"step": 10**400}]},
    {"history": [{"step": True}]},
    {"format": 1},
]


@pytest.mark.parametrize("change", TAMPERED_NOTES, ids=lambda change: json.dumps(change)[:60])
def test_notes_that_do_not_fit_are_rejected(saved, tmp_path, change):
    _, note, arrays = saved
    save_arrays(tmp_path / "a.npz", note | change, arrays)
    with pytest.raises(ValueError, match=r"a\.npz"):
        TopKRecommender.load(tmp_path / "a.npz")


def archive(path, members, **options):
    """An archive of raw members with a right checksum."""
    from bilevax.applications.ranking import array_file

    with zipfile.ZipFile(path, "w") as file:
        for name, content in members:
            file.writestr(name, content, **options)
    with path.open("r+b") as file:
        array_file._append_checksum(file)


def npy(header, data=b""):
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


HOSTILE = {
    "a huge array": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}"),
    "a negative size": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}", bytes(8)),
    "an overflowing size": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2**62, 4)}"),
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
    "a deep header": npy("(" * 5000),
    "no header": b"\x93NUMPY\x01\x00",
    "another version": b"\x93NUMPY\x03\x00" + bytes(200),
    "no array": b"",
    "empty strings": npy("{'descr': '<U0', 'fortran_order': False, 'shape': (3,)}"),
}


@pytest.mark.parametrize("member", HOSTILE.values(), ids=HOSTILE)
def test_hostile_arrays_are_rejected(tmp_path, member):
    archive(tmp_path / "a.npz", [("a.npy", member)])
    with pytest.raises(ValueError, match=r"a\.npz must be a file that save\(\) wrote"):
        TopKRecommender.load(tmp_path / "a.npz")


@pytest.mark.parametrize("text", [b"[" * 100_000, b"3", b"\xff", b"{", b"1" * 10_000, b"[]"])
def test_hostile_notes_are_rejected(tmp_path, text):
    member = npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(text)},)}}", text)
    archive(tmp_path / "a.npz", [("about.json.npy", member)])
    with pytest.raises(ValueError, match=r"a\.npz must be a file that save\(\) wrote"):
        TopKRecommender.load(tmp_path / "a.npz")


def test_compressed_and_repeated_members_are_rejected(saved, tmp_path):
    one = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (100000000,)}", bytes(10**8))
    archive(tmp_path / "bomb.npz", [("a.npy", one)], compress_type=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.npz").stat().st_size < 10**6
    member = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1,)}", b"1")
    with pytest.warns(UserWarning, match="Duplicate"):
        archive(tmp_path / "twice.npz", [("a.npy", member), ("a.npy", member)])
    for name in ("bomb.npz", "twice.npz"):
        with pytest.raises(ValueError, match="compressed or occurs twice"):
            TopKRecommender.load(tmp_path / name)


CONFIGURATIONS = {
    "list.json": b"[1, [2]]",
    "deep.json": b"[" * 100_000,
    "deep.toml": b"a = " + b"[" * 100_000,
    "text.json": b"\xff\xfe",
    "syntax.toml": b"a = ",
    "kind.toml": b'epochs = "3"',
    "range.toml": b"epochs = 0",
    "settings.json": b'{"settings": 3}',
    "setting.json": b'{"settings": {"alpha": "a"}}',
    "model.json": b'{"model": []}',
    "digits.json": b'{"epochs": ' + b"1" * 10_000 + b"}",
    "large.json": b" " * (2**20 + 1),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_bad_configurations_are_rejected_with_the_name_of_the_file(tmp_path, name):
    (tmp_path / name).write_bytes(CONFIGURATIONS[name])
    with pytest.raises(ValueError, match=name):
        TopKRecommender.from_file(tmp_path / name)


def test_folders_pipes_and_missing_files_are_told_apart(fitted, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe.json", "folder.json"):
        for read in (TopKRecommender.load, TopKRecommender.from_file):
            with pytest.raises(ValueError, match=f"{name} must be a file, got a folder, a device or a pipe"):
                read(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} must be a file or not exist yet"):
            fitted.save(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe.json").stat().st_mode)
    with pytest.raises(FileNotFoundError):
        TopKRecommender.load(tmp_path / "nothing.npz")
    with pytest.raises(FileNotFoundError):
        fitted.save(tmp_path / "nowhere" / "a.npz")


def test_saving_follows_no_planted_link_and_leaves_nothing_behind(fitted, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("a.npz.part", ".a.npz.part", "a.npz.tmp"):
        (tmp_path / name).symlink_to(precious)
    before = set(os.listdir(tmp_path))
    fitted.save(tmp_path / "a.npz")
    assert precious.read_text() == "mine"
    assert set(os.listdir(tmp_path)) == before | {"a.npz"}
    (tmp_path / "link.npz").symlink_to(precious)
    fitted.save(tmp_path / "link.npz")
    assert precious.read_text() == "mine"
    assert TopKRecommender.load(tmp_path / "link.npz").recommend(0) == fitted.recommend(0)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_keeps_the_old_file_and_no_part(fitted, tmp_path, monkeypatch, error):
    fitted.save(tmp_path / "a.npz")
    old = (tmp_path / "a.npz").read_bytes()

    def failing(*_):
        raise error

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, failing)
            with pytest.raises(type(error)):
                fitted.save(tmp_path / "a.npz")
        assert os.listdir(tmp_path) == ["a.npz"]
        assert (tmp_path / "a.npz").read_bytes() == old


def test_a_new_file_has_the_usual_permissions(fitted, tmp_path):
    (tmp_path / "other").touch()
    fitted.save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_tilde_is_the_home_folder(fitted, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fitted.save("~/a.npz")
    assert os.listdir(tmp_path) == ["a.npz"]
    assert TopKRecommender.load("~/a.npz").recommend(0) == fitted.recommend(0)
    (tmp_path / "b.toml").write_text("epochs = 3")
    assert TopKRecommender.from_file("~/b.toml").epochs == 3
    with pytest.raises(ValueError, match="nobody-has-this-name"):
        TopKRecommender.load("~nobody-has-this-name/a.npz")


def test_large_ids_are_told_apart():
    users = np.repeat([2**31, 2**32 + 2**31, 2**53, 2**53 + 1], 3)
    items = np.tile([0, 2**31, 2**40], 4)
    recommender = TopKRecommender(
        "softmax", model="mf", width=1, epochs=1, held_out=0, settings={"negatives": 2, "positives": 2}
    )
    recommender.fit({"user": users, "item": items}, progress=None)
    codes = [recommender._fitted.user_code(user) for user in (2**31, 2**32 + 2**31, 2**53, 2**53 + 1)]
    assert codes == [0, 1, 2, 3]
    assert recommender._fitted.user_code(np.float64(2**53)) == 2
    assert {item for item, _ in recommender.recommend(2**31, k=3, seen=True)} == {0, 2**31, 2**40}
    for wrong in (0, 2**63, 10**400, -(2**63) - 1, float("nan"), float("inf"), 0.5, 1j):
        with pytest.raises(KeyError, match="user must be an id of the table"):
            recommender.recommend(wrong, k=1)


@pytest.mark.parametrize(
    ("offsets", "items", "item_count", "words"),
    [
        (np.array([0, 3, 2], np.uint32), [0, 1], 3, "offsets must ascend"),
        (np.array([0, 3, 2], np.uint64), [0, 1], 3, "offsets must ascend"),
        (np.array([0, 2**63, 2], np.uint64), [0, 1], 3, "offsets must ascend"),
        ([0, 2], [0, 2**31], 2**31 + 1, "item_count must be between 1 and 2147483647"),
        ([0, 2], np.array([0, 2**63], np.uint64), 3, r"items must lie in 0\.\.2"),
    ],
)
def test_unsigned_and_large_numbers_do_not_wrap_around(offsets, items, item_count, words):
    with pytest.raises(ValueError, match=words):
        Ratings(offsets, items, np.ones(2), item_count)
