"""Files: whatever is at a path, reading it ends, and the only error is `DataError`."""

import codecs
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from deadline import deadline

from bilevax.data import DataError, load, load_interactions, read_libsvm
from bilevax.data.archives import open_member, safe_extract
from bilevax.data.checksums import digest, text_sha256
from bilevax.data.errors import printable
from bilevax.data.files import open_bytes, read_pieces


def read_all(path):
    with open_bytes(path) as stream:
        return b"".join(read_pieces(stream, path))


def member(path):
    with open_member(path, "rows") as stream:
        return stream.read()


# Every function that takes a path to read, with a name that it accepts.
READERS = {
    "read_libsvm": (read_libsvm, "rows"),
    "read_libsvm, packed": (read_libsvm, "rows.gz"),
    "load_interactions": (load_interactions, "u.data"),
    "load_interactions, table": (load_interactions, "table.csv"),
    "load_interactions, parquet": (load_interactions, "table.parquet"),
    "load_interactions, archive": (load_interactions, "set.zip"),
    "safe_extract": (lambda path: safe_extract(path, path.parent / "out"), "set.tar.gz"),
    "open_member": (member, "set.zip"),
    "open_bytes": (read_all, "text.xz"),
    "digest": (digest, "rows"),
    "text_sha256": (text_sha256, "rows"),
}
every_reader = pytest.mark.parametrize("reader", READERS)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
@every_reader
def test_only_regular_files_are_read(tmp_path, reader, kind):
    read, name = READERS[reader]
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    expected = "is a pipe, a socket or a device|is a folder|holds no table"
    with deadline(), pytest.raises(DataError, match=expected):
        read(path)


def test_pipe_in_place_of_a_known_data_set_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    (tmp_path / "libsvm").mkdir()
    os.mkfifo(tmp_path / "libsvm" / "a8a")
    with deadline(), pytest.raises(DataError, match="is a pipe"):
        load("a8a", download=False)


@pytest.mark.parametrize("name", ["\0", "a\0b", "\ud800", "x" * 5000, "/".join("d" * 4000)])
@every_reader
def test_names_that_no_file_can_have_are_data_errors(tmp_path, reader, name):
    read, ending = READERS[reader]
    with pytest.raises(DataError):
        read(tmp_path / f"{name}{ending}")


@pytest.fixture
def closed_folder():
    """A folder without permissions that holds a file of every reader, seen by a user without privileges."""
    outer = Path(tempfile.mkdtemp())
    closed = outer / "closed"
    closed.mkdir()
    for _, name in READERS.values():
        (closed / name).write_bytes(b"")
    outer.chmod(0o777)
    closed.chmod(0)
    privileged = os.geteuid() == 0
    if privileged:
        codecs.lookup("cp437")  # for zip archives: Python's own files may be out of reach after the next line
        os.seteuid(65534)
    yield closed
    if privileged:
        os.seteuid(0)
    closed.chmod(0o700)
    subprocess.run(["rm", "-rf", str(outer)], check=True)


@every_reader
def test_folder_without_permission_is_a_data_error(closed_folder, reader):
    read, name = READERS[reader]
    with pytest.raises(DataError, match="Permission denied"):
        read(closed_folder / name)


def test_folder_that_cannot_be_listed_is_a_data_error(closed_folder):
    with pytest.raises(DataError, match="cannot be opened: Permission denied"):
        load_interactions(closed_folder)
    with pytest.raises(DataError, match="cannot be opened: Permission denied"):
        load_interactions(closed_folder.parent)


def test_data_folder_without_permission_is_a_data_error(closed_folder, monkeypatch):
    monkeypatch.setenv("BILEVAX_DATA", str(closed_folder / "inner"))
    for get in (load, load_interactions):
        with pytest.raises(DataError, match="cannot be found: Permission denied"):
            get("a8a" if get is load else "ml-1m", download=False)


def test_unpacking_without_permission_is_a_data_error(closed_folder):
    archive = closed_folder.parent / "set.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("rows", "1 1:1")
    for target in (closed_folder, closed_folder / "out", closed_folder / "new" / "out"):
        with pytest.raises(DataError, match="cannot be unpacked: Permission denied"):
            safe_extract(archive, target)


@pytest.fixture
def deep_folder(tmp_path):
    """A folder in 1,500 folders, deeper than Python's stack."""
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    handle = os.open("u.data", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(handle, b"1\t2\t3\t4\n")
    os.close(handle)
    os.close(here)
    yield tmp_path / "d"
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_table_in_1500_folders_is_found(deep_folder):
    assert len(load_interactions(deep_folder)) == 1


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_member_in_1500_folders_is_rejected(tmp_path, kind):
    path, name = tmp_path / f"deep.{kind}", "d/" * 1500 + "rows"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, "1 1:1")
    else:
        with tarfile.open(path, "w") as archive:
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=r"d/d/.*…' is in more than 100 folders"):
        safe_extract(path, tmp_path / "out")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    "error",
    [OSError, ValueError, MemoryError, RecursionError, AttributeError, OverflowError, IndexError, Exception],
)
def test_any_failure_of_a_decoder_is_a_data_error(error):
    class Stream:
        def read(self, _):
            raise error("details")

    with pytest.raises(DataError, match="rows: cannot be read, it is damaged or cut off: details"):
        list(read_pieces(Stream(), "rows"))


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").write_text("1 1:1\n")
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n")
    assert read_libsvm("~/rows")[0].shape == (1, 1)
    assert len(load_interactions("~/u.data")) == 1
    assert len(digest("~/rows")) == 64


def test_folders_of_the_environment_may_start_with_a_tilde(tmp_path, monkeypatch):
    from bilevax.data.locate import cache_folder, places
    from bilevax.data.registry import entry_of

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BILEVAX_DATA", "~/data")
    monkeypatch.setenv("BILEVAX_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "cache"
    found = list(places(entry_of("ml-1m").sources[0]))
    assert found == [tmp_path / "data" / "ml-1m.zip", tmp_path / "cache" / "ml-1m.zip"]


def test_unknown_home_folder_is_a_data_error():
    with pytest.raises(DataError, match="cannot be found: Could not determine home directory"):
        read_libsvm("~nobody-of-this-name/rows")


def test_cache_folder_is_needed_only_if_the_file_is_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    monkeypatch.delenv("BILEVAX_CACHE", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(ImportError, match=r'needs platformdirs: pip install "bilevax\[data\]"'):
        load_interactions("ml-1m", download=False)
    (tmp_path / "ml-1m").mkdir()
    with pytest.raises(DataError, match="holds no table of ratings"):
        load_interactions("ml-1m", download=False)


def stripped_sha256(text):
    """The definition in docs/data.md, in one line."""
    return hashlib.sha256(b"\n".join(line.rstrip() for line in text.rstrip().split(b"\n"))).hexdigest()


def test_checksum_of_a_text_is_that_of_its_stripped_lines(tmp_path):
    random = np.random.default_rng(0)
    texts = [b"", b"\n", b" \r\n\n", b"\n\na", b"a\n" + b"\n" * 100_000 + b"b \n\n", b"a" * 100 + b" "]
    for _ in range(50):
        texts.append(bytes(random.choice(list(b"ab \t\r\n\n\n\x0b\x0c"), random.integers(1, 200))))
    # Larger than the pieces that are read, with blank lines across their ends.
    texts.append(b"1 2:3 \r\n" * 200_000 + b"\n" * 3_000_000 + b"x")
    for text in texts:
        (tmp_path / "text").write_bytes(text)
        assert text_sha256(tmp_path / "text") == stripped_sha256(text)


def test_known_text_is_not_read_far_beyond_its_size(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVAX_DATA", str(tmp_path))
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "a8a").write_bytes(b"1 1:1\n" * 1_000_000)
    with pytest.raises(DataError, match="holds more than the limit of 3,293,722 bytes"):
        load("a8a", download=False)


def test_data_error_survives_pickling():
    error = pickle.loads(pickle.dumps(DataError("expected a number", path="files/a8a", line=17)))
    assert str(error) == "a8a, line 17: expected a number"
    assert (error.problem, error.path, error.line) == ("expected a number", "files/a8a", 17)


def test_messages_hold_no_control_characters():
    assert str(DataError("is empty", path="\x1b[2J\n")) == r"\x1b[2J\n: is empty"
    assert printable("é\x9b\u2028" + "x" * 300, 5) == r"é\x9b\u2028xx…"
