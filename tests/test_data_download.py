"""Downloads from a local server: checked, limited in size, tried again, all or nothing."""

import errno
import hashlib
import os
import resource
import socketserver
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from deadline import deadline

from bilevax.data import DataError, download
from bilevax.data.download import fetch

BODY = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Behaves as the path says; counts the requests."""

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
            pass  # the client has closed the connection


def serving(running):
    with running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()
        thread.join()


@pytest.fixture
def server():
    Handler.asked.clear()
    yield from serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


class Hostile(socketserver.StreamRequestHandler):
    """Sends the bytes of a case of `HOSTILE`, and nothing else."""

    sent = 0

    def handle(self):
        case = self.rfile.readline().split()[1].decode().strip("/")
        while self.rfile.readline().strip():
            pass
        # Many times the same bytes, for an answer that does not end.
        for _ in range(1000 if case == "endless_redirection" else 1):
            try:
                self.wfile.write(HOSTILE[case][0])
            except OSError:
                return  # the client has closed the connection
            Hostile.sent += len(HOSTILE[case][0])


@pytest.fixture
def hostile_server():
    Hostile.sent = 0
    yield from serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Hostile))


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


def answer(*headers, body=b"", status=b"200 OK"):
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", body])


def redirection(location):
    return answer(b"Location: " + location, b"Content-Length: 0", status=b"302 Found")


CHUNKED = b"Transfer-Encoding: chunked"

# Raw answers of a server, and what the error says.
HOSTILE = {
    "length_of_5000_digits": (answer(b"Content-Length: " + b"9" * 5000, body=b"x"), "more than the limit"),
    "length_with_5000_zeros": (
        answer(b"Content-Length: " + b"0" * 5000 + b"9", body=b"x"),
        "ended after 1 of 9 bytes",
    ),
    "negative_chunk": (answer(CHUNKED, body=b"-5\r\nhello\r\n0\r\n\r\n"), "cannot be downloaded"),
    "chunk_of_minus_1": (answer(CHUNKED, body=b"-1\r\n" + b"x" * 100_000), "cannot be downloaded"),
    "endless_chunk": (answer(CHUNKED, body=b"-1\r\n" + b"x" * 2_000_000), "sends more than the limit"),
    "huge_chunk": (answer(CHUNKED, body=b"f" * 5000 + b"\r\nhello"), "cannot be downloaded"),
    "chunk_of_no_number": (answer(CHUNKED, body=b"zz\r\nhello\r\n"), "cannot be downloaded"),
    "chunk_cut_off": (answer(CHUNKED, body=b"5\r\nhe"), "cannot be downloaded"),
    "no_answer": (b"", "cannot be downloaded"),
    "no_http": (b"220 smtp.example.org\r\n", "cannot be downloaded"),
    "status_of_no_number": (b"HTTP/1.1 OK\r\n\r\n", "cannot be downloaded"),
    "status_of_5000_digits": (b"HTTP/1.1 " + b"2" * 5000 + b" OK\r\n\r\n", "cannot be downloaded"),
    "long_header": (answer(b"X: " + b"x" * 100_000), "cannot be downloaded"),
    "many_headers": (answer(*[b"X: x"] * 1000), "cannot be downloaded"),
    "escape_sequence": (answer(status=b"404 \x1b[2J"), r"404 \\x1b\[2J"),
    "redirection_without_location": (answer(status=b"302 Found"), "302 Found"),
    "redirection_to_itself": (redirection(b"/redirection_to_itself"), "more than 10 redirections"),
    "redirection_to_nothing": (redirection(b""), "more than 10 redirections"),
    "redirection_to_no_host": (redirection(b"http:///"), "cannot be downloaded"),
    "redirection_to_half_an_address": (redirection(b"http://[::1"), "Invalid IPv6 URL"),
    "redirection_to_half_an_address_without_scheme": (redirection(b"//[::1"), "Invalid IPv6 URL"),
    "redirection_to_no_port": (redirection(b"http://127.0.0.1:port/"), "cannot be downloaded"),
    "redirection_to_a_large_port": (redirection(b"http://127.0.0.1:99999999999/"), "cannot be downloaded"),
    "redirection_to_a_port_of_5000_digits": (
        redirection(b"http://127.0.0.1:" + b"9" * 5000),
        "cannot be downloaded",
    ),
    "redirection_to_a_long_name": (
        redirection(b"http://" + b"a" * 70 + b".example/"),
        "cannot be downloaded",
    ),
    "redirection_to_bytes": (redirection(b"http://\xff\xfe/\xff"), "cannot be downloaded"),
    "redirection_to_a_file": (redirection(b"file:///etc/passwd"), "is not a URL of the kind http"),
    "redirection_to_data": (redirection(b"data:text/plain,hello"), "is not a URL of the kind http"),
    "redirection_to_an_escape_sequence": (redirection(b"\x1b]0;title\x07"), "cannot be downloaded"),
    "endless_redirection": (
        answer(b"Location: /length_of_5000_digits", body=b"x" * 100_000, status=b"302 Found"),
        "more than the limit",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_server_causes_a_data_error_and_nothing_else(hostile_server, tmp_path, case):
    with deadline(), pytest.raises(DataError, match=HOSTILE[case][1]) as caught:
        get(hostile_server + case, tmp_path / "file", size_limit=1_000_000)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert os.listdir(tmp_path) == []
    assert Hostile.sent < 20_000_000  # of the 100 MB of the endless redirection


@pytest.mark.parametrize("url", ["http://[::1", "http://\ud800/", "http://\0/", "", "http:", "nonsense"])
def test_url_that_is_none_is_a_data_error(tmp_path, url):
    with pytest.raises(DataError):
        get(url, tmp_path / "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "/".join("d" * 1500) + "/file"])
def test_name_that_no_file_can_have_is_a_data_error(server, tmp_path, name):
    try:
        with pytest.raises(DataError, match="cannot be written"):
            get(server + "file", tmp_path / name)
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


@pytest.mark.parametrize("hidden", [".file.part", ".file.lock"])
@pytest.mark.parametrize("exists", [True, False])
def test_planted_links_are_not_followed(server, tmp_path, hidden, exists):
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    if exists:
        victim.write_text("precious")
    (folder / hidden).symlink_to(victim)
    with suppress(DataError):
        get(server + "file", folder / "file")
    assert victim.exists() == exists
    if exists:
        assert victim.read_text() == "precious"


def test_a_link_in_place_of_the_hidden_file_is_replaced(server, tmp_path):
    (tmp_path / ".file.part").symlink_to(tmp_path / "elsewhere")
    assert get(server + "file", tmp_path / "file", sha256=SHA256).read_bytes() == BODY
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["file", ".file.part", ".file.lock"])
def test_pipes_do_not_hang(server, tmp_path, name):
    os.mkfifo(tmp_path / name)
    if name == "file":
        with deadline(), pytest.raises(DataError, match="is a pipe, a socket or a device, expected a file"):
            get(server + "file", tmp_path / "file")
        return
    with deadline():
        assert get(server + "file", tmp_path / "file").read_bytes() == BODY


def test_folder_at_the_target_is_an_error(server, tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        get(server + "file", tmp_path / "file")


@pytest.mark.parametrize("closed", [True, False])
def test_progress_without_a_terminal_shows_nothing(server, tmp_path, monkeypatch, closed):
    stream = None
    if closed:
        stream = open(os.devnull, "w")  # noqa: SIM115
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert get(server + "file", tmp_path / "file", progress=True).read_bytes() == BODY


def test_a_leading_tilde_is_the_home_folder(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert get(server + "file", "~/new/file") == tmp_path / "home" / "new" / "file"
    assert os.listdir(tmp_path) == ["home"]


def test_check_that_fails_otherwise_is_a_data_error_too(server, tmp_path):
    def check(_):
        raise KeyError("rows")

    with pytest.raises(DataError, match="cannot be checked: 'rows'"):
        get(server + "file", tmp_path / "file", check=check)
    assert os.listdir(tmp_path) == []


def test_missing_filelock_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(ImportError, match=r'downloads need filelock: pip install "bilevax\[data\]"'):
        get(server + "file", tmp_path / "file")


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
