"""Archives: good ones unpack, and bad members neither leave their folder nor fill the disk."""

import gzip
import io
import os
import stat
import tarfile
import zipfile

import pytest
from deadline import deadline

from bilevax.data import DataError
from bilevax.data.archives import open_archive, open_member, safe_extract

FILES = {"set/ratings.dat": b"1::2::3::4\n" * 100, "set/README": b"read me", "empty": b""}


def make_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return path


def make_tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


MAKERS = {
    "zip": lambda path, files: make_zip(path, files),
    "tar": lambda path, files: make_tar(path, files, "w"),
    "tar.gz": lambda path, files: make_tar(path, files, "w:gz"),
    "tar.bz2": lambda path, files: make_tar(path, files, "w:bz2"),
    "tar.xz": lambda path, files: make_tar(path, files, "w:xz"),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)


@every_kind
def test_good_archive_unpacks_to_its_files(tmp_path, kind):
    path = MAKERS[kind](tmp_path / f"good.{kind}", FILES.items())
    written = safe_extract(path, tmp_path / "out" / "there")
    found = {str(file.relative_to(tmp_path / "out/there")): file.read_bytes() for file in written}
    assert found == FILES
    assert sorted(os.listdir(tmp_path / "out")) == ["there"]


@every_kind
def test_member_is_read_by_its_name_or_the_end_of_it(tmp_path, kind):
    path = MAKERS[kind](tmp_path / f"good.{kind}", FILES.items())
    for name in ("set/ratings.dat", "ratings.dat"):
        with open_member(path, name) as stream:
            assert stream.read() == FILES["set/ratings.dat"]
    with pytest.raises(DataError, match="has 0 members called 'other'"), open_member(path, "other"):
        pass


@every_kind
@pytest.mark.parametrize(
    "name", ["../out", "set/../../out", "/tmp/out", "C:/out", "C:out", "..\\out", "set\\..\\..\\out", ".."]
)
def test_member_that_leaves_its_folder_is_refused_and_nothing_written(tmp_path, kind, name):
    path = MAKERS[kind](tmp_path / f"bad.{kind}", [("good", b"text"), (name, b"text")])
    with pytest.raises(DataError, match="would leave the folder"):
        safe_extract(path, tmp_path / "inner" / "folder")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    info = tarfile.TarInfo("member")
    info.type, info.linkname = kind, "/etc/passwd"
    path = make_tar(tmp_path / "bad.tar.gz", [(info, b"")])
    with pytest.raises(DataError, match="is a link or a device"):
        safe_extract(path, tmp_path / "out")
    assert os.listdir(tmp_path) == [path.name]


def test_links_in_a_zip_are_refused(tmp_path):
    info = zipfile.ZipInfo("member")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    path = make_zip(tmp_path / "bad.zip", [(info, b"/etc/passwd")])
    with pytest.raises(DataError, match="is a link or a device"):
        safe_extract(path, tmp_path / "out")


@every_kind
def test_bomb_is_refused_by_ratio_size_and_count(tmp_path, kind):
    path = MAKERS[kind](tmp_path / f"bomb.{kind}", [("zeros", b"\0" * (8 << 20))])
    options = {"ratio_limit": 0.5} if kind == "tar" else {}  # a plain tar is as large as what it holds
    with pytest.raises(DataError, match="more than the limit of"):
        safe_extract(path, tmp_path / "out", **options)
    with pytest.raises(DataError, match="more than the limit of 1,000"):
        safe_extract(path, tmp_path / "out", size_limit=1000, ratio_limit=1e9)
    many = MAKERS[kind](tmp_path / f"many.{kind}", [(str(i), b"") for i in range(20)])
    with pytest.raises(DataError, match="more than the limit of 10 members"):
        safe_extract(many, tmp_path / "out", count_limit=10)
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, many.name])


def test_zip_that_declares_less_than_it_holds_is_refused(tmp_path):
    path = make_zip(tmp_path / "liar.zip", [("zeros", b"\0" * (4 << 20))])
    data = path.read_bytes()
    path.write_bytes(data.replace((4 << 20).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    with pytest.raises(DataError):
        safe_extract(path, tmp_path / "out")
    assert os.listdir(tmp_path) == [path.name]


@every_kind
def test_damaged_archive_is_refused_and_nothing_left(tmp_path, kind):
    path = MAKERS[kind](tmp_path / f"bad.{kind}", [("numbers", os.urandom(50_000))])
    data = path.read_bytes()
    damaged = {"empty": b"", "cut": data[: len(data) // 2], "text": b"1::2::3\n" * 100}
    if kind != "tar":  # which has no checksum of its data
        damaged["flipped"] = data[:20_000] + bytes(byte ^ 255 for byte in data[20_000:20_100]) + data[20_100:]
    for content in damaged.values():
        path.write_bytes(content)
        with pytest.raises(DataError):
            safe_extract(path, tmp_path / "out")
        assert os.listdir(tmp_path) == [path.name]


def test_member_twice_encrypted_member_and_full_folder_are_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = make_zip(tmp_path / "twice.zip", [("one", b"1"), ("one", b"2")])
    with pytest.raises(DataError, match="has the member 'one' twice"):
        safe_extract(path, tmp_path / "out")
    data = bytearray(make_zip(tmp_path / "secret.zip", [("one", b"1")]).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "secret.zip").write_bytes(bytes(data))
    with pytest.raises(DataError, match="is encrypted"):
        safe_extract(tmp_path / "secret.zip", tmp_path / "out")
    good = make_zip(tmp_path / "good.zip", FILES.items())
    with pytest.raises(DataError, match="exists and is not an empty folder"):
        safe_extract(good, tmp_path)


def test_folders_are_made_and_a_file_in_the_way_is_refused(tmp_path):
    path = make_zip(tmp_path / "good.zip", [("a/", b""), ("a/b", b"1")])
    assert safe_extract(path, tmp_path / "out") == [tmp_path / "out/a/b"]
    clash = make_zip(tmp_path / "clash.zip", [("a", b"1"), ("a/b", b"1")])
    with pytest.raises(DataError, match="cannot be unpacked"):
        safe_extract(clash, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def header(name, size, kind=tarfile.REGTYPE):
    """A block of a tar archive, of a size that tarfile would not write."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size.to_bytes(12, "big", signed=True) if size < 0 else b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


LONG_NAME, PAX = b"L", b"x"
END = header("good", 0) + bytes(1024)
HOSTILE_TARS = {
    "a negative size": header("a", -512) + END,
    "a negative size that leads back": header("a", 0) + header("b", -1024) + END,
    "a negative size of a folder": header("a", 0) + header("b", -1024, tarfile.DIRTYPE) + END,
    "a negative size of a name": header("a", -512, LONG_NAME) + END,
    "a negative size of a header": header("a", -512, PAX) + END,
    "a name of 50 MB": header("a", 50_000_000, LONG_NAME) + b"x" * 50_000_176 + END,
    "a header that takes quadratic time": header("a", 1 << 20, PAX) + b"1" * (1 << 20) + END,
    "a small one that does": header("a", 1 << 14, PAX) + b"1" * (1 << 14) + END,
    "3,000 names of one member": (header("a", 4, LONG_NAME) + b"abc".ljust(512, b"\0")) * 3000 + END,
    "a size in a header": header("a", 16, PAX) + b"16 size=-100000\n".ljust(512, b"\0") + END,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", HOSTILE_TARS)
def test_hostile_tar_is_rejected_at_once(tmp_path, case, packed):
    path = tmp_path / "bad.tar"
    path.write_bytes(gzip.compress(HOSTILE_TARS[case]) if packed else HOSTILE_TARS[case])
    with deadline(), pytest.raises(DataError):
        safe_extract(path, tmp_path / "out", ratio_limit=1e9)
    assert os.listdir(tmp_path) == ["bad.tar"]


def test_long_names_are_unpacked(tmp_path):
    name = "/".join(["folder" * 20] * 20)
    path = make_tar(tmp_path / "good.tar.gz", [(name, b"1"), ("1" * 200, b"2")])
    assert [file.read_bytes() for file in safe_extract(path, tmp_path / "out")] == [b"1", b"2"]


def test_names_in_messages_hold_no_control_characters(tmp_path):
    path = make_zip(tmp_path / "bad.zip", [("../\x1b[2J" + "x" * 1000, b"")])
    with pytest.raises(DataError, match="would leave the folder") as caught:
        safe_extract(path, tmp_path / "out")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_listing_a_packed_tar_does_not_unpack_more_than_the_limit(tmp_path):
    path = make_tar(tmp_path / "bomb.tar.gz", [("zeros", b"\0" * (32 << 20)), ("after", b"text")])
    with pytest.raises(DataError, match="unpacks to more than the limit"), open_archive(path):
        pass
