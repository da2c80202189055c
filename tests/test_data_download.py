"""Downloads from a local server: checked, limited, tried again, and never half there."""

import errno
import hashlib
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from bilevax.data import DataError, download
from bilevax.data.download import fetch

BODY = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Behaves as the path says; counts what was asked for."""

    asked: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def log_message(self, *_):
        pass

    def do_GET(self):
        with self.lock:
            self.asked[self.path] += 1
            count = self.asked[self.path]
        name = self.path.strip("/").split("/")[0]
        if name == "missing":
            return self.send_error(404)
        if name == "broken" or (name == "shaky" and count < 3):
            return self.send_error(503)
        if name == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "ftp://example.org/file")
            return self.end_headers()
        self.send_response(200)
        if name != "endless":
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        try:
            if name == "cut" or (name == "cut-once" and count == 1):
                return self.wfile.write(BODY[:1000])
            for _ in range(100 if name == "endless" else 1):
                self.wfile.write(BODY)
        except OSError:
            pass  # the client has had enough


@pytest.fixture
def server():
    Handler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


def get(url, target, **options):
    settings = {"schemes": ("http",), "pauses": (0.0, 0.0), "progress": False, "timeout": 10.0}
    return fetch(url, target, **(settings | options))


def test_file_arrives_whole_in_a_new_folder_and_is_not_asked_for_again(server, tmp_path):
    target = tmp_path / "new" / "file"
    for _ in range(2):
        assert get(server + "file", target, sha256=SHA256, md5=MD5) == target
    assert target.read_bytes() == BODY
    assert Handler.asked["/file"] == 1
    assert os.listdir(target.parent) == ["file"]


@pytest.mark.parametrize("name", ["shaky", "cut-once"])
def test_failures_that_pass_are_tried_again(server, tmp_path, name):
    assert get(server + name, tmp_path / "file", sha256=SHA256).read_bytes() == BODY


REFUSED = {
    "another checksum": ("file", {"sha256": "0" * 64}, f"has the sha256 {SHA256}, expected 0000"),
    "another md5": ("file", {"md5": "0" * 32}, f"has the md5 {MD5}"),
    "too large as announced": (
        "file",
        {"size_limit": 1000},
        "has 256,000 bytes, more than the limit of 1,000",
    ),
    "too large as sent": ("endless", {"size_limit": 1_000_000}, "sends more than the limit of 1,000,000"),
    "not there": ("missing", {}, "404 Not Found"),
    "a server in trouble": ("broken", {}, r"\(3 attempts\): the server answered 503"),
    "a connection that ends": ("cut", {}, "ended after 1,000 of 256,000 bytes"),
    "led to another scheme": ("elsewhere", {}, "not a URL of the kind http"),
    "not https": ("file", {"schemes": ("https",)}, "is not a URL of the kind https"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_download_leaves_nothing_behind(server, tmp_path, case):
    name, options, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        get(server + name, tmp_path / "file", **options)
    assert os.listdir(tmp_path) == []


def test_nobody_there_is_an_error_after_several_attempts(tmp_path):
    with pytest.raises(DataError, match="cannot be downloaded \\(3 attempts\\)"):
        get("http://127.0.0.1:1/file", tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_own_check_decides_before_the_file_has_its_name(server, tmp_path):
    seen = []

    def check(path):
        seen.append((path.read_bytes(), (tmp_path / "file").exists()))
        raise DataError("is not to my liking", path=path)

    with pytest.raises(DataError, match="not to my liking"):
        get(server + "file", tmp_path / "file", check=check)
    assert seen == [(BODY, False)]
    assert os.listdir(tmp_path) == []


def test_interrupt_leaves_nothing_behind(server, tmp_path, monkeypatch):
    from contextlib import contextmanager

    @contextmanager
    def interrupted(*_):
        def advance(_):
            raise KeyboardInterrupt

        yield advance

    monkeypatch.setattr(download, "_bar", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get(server + "file", tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_disk_that_fills_up_leaves_nothing_behind(server, tmp_path):
    # A limit on the size of files fails in the same place as a full disk: in write.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DataError, match=f"file: cannot be written: {os.strerror(errno.EFBIG)}"):
            get(server + "file", tmp_path / "file")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_target_in_a_file_is_an_error(server, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        get(server + "file", tmp_path / "taken" / "file")


def test_wrong_file_that_was_there_is_reported_and_kept(server, tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"mine")
    with pytest.raises(DataError, match="expected"):
        get(server + "file", target, sha256=SHA256)
    assert target.read_bytes() == b"mine"


def test_leftover_of_a_killed_process_does_no_harm(server, tmp_path):
    (tmp_path / ".file.part").write_bytes(b"half a fi")
    (tmp_path / ".file.lock").touch()
    assert get(server + "file", tmp_path / "file", sha256=SHA256).read_bytes() == BODY
    assert os.listdir(tmp_path) == ["file"]


def test_threads_that_want_the_same_file_download_it_once(server, tmp_path):
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(get(server + "file", tmp_path / "file", sha256=SHA256))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert Handler.asked["/file"] == 1
    assert os.listdir(tmp_path) == ["file"]


def test_processes_that_want_the_same_file_download_it_once(server, tmp_path):
    code = (
        "import sys; from bilevax.data.download import fetch; "
        "fetch(sys.argv[1], sys.argv[2], sha256=sys.argv[3], schemes=('http',))"
    )
    command = [sys.executable, "-c", code, server + "file", str(tmp_path / "file"), SHA256]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert Handler.asked["/file"] == 1
    assert os.listdir(tmp_path) == ["file"]


def test_checksum_of_another_length_is_refused_before_anything_is_sent(server, tmp_path):
    with pytest.raises(ValueError, match="sha256 must be a hexadecimal checksum"):
        get(server + "file", tmp_path / "file", sha256="abc")
    assert not Handler.asked
