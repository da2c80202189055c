"""What comes from outside: files of data, servers, and saved recommenders that somebody has changed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socketserver
import sys
import tempfile
import threading
from pathlib import Path

from faults.runs import REFUSED, RESUMED, ViolationError

sys.path.append(str(Path(__file__).parent.parent / "fuzz"))

INPUTS = 20  # of a parser, in one fault
BODY = bytes(range(256)) * 40
LIMIT = 100_000


def hostile_data(rng, number):
    """Noise, shuffled tokens and damaged good files for every parser: it accepts them or raises DataError."""
    import parsers

    names = list(parsers.TARGETS)
    found = parsers.fuzz(names[number % len(names)], INPUTS, int(rng.integers(2**31)))
    return REFUSED if found["refused"] else RESUMED


LINES = [
    b"Content-Length: %d" % len(BODY), b"Content-Length: -1", b"Content-Length: " + b"9" * 5000,
    b"Content-Length: 1e3", b"Content-Length: %d" % (len(BODY) - 1), b"Content-Length: %d" % 10**12,
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Encoding: gzip",
    b"Location: http://127.0.0.1:1/", b"Location: //", b"Location: http://[", b"Location: file:///etc/passwd",
    b"Location: \xff\xfe", b"Connection: close", b"X: " + b"y" * 70_000, b": no name", b"no colon",
    b" folded", b"\x00\x00", b"Set-Cookie: a=b",
]  # fmt: skip
STATUSES = [
    b"HTTP/1.1 200 OK", b"HTTP/1.0 200", b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 302 Found",
    b"HTTP/1.1 301", b"HTTP/1.1 404 No", b"HTTP/1.1 503 Later", b"HTTP/1.1 204 Nothing", b"HTTP/9.9 200 OK",
    b"HTTP/1.1 -1", b"HTTP/1.1 99999 X", b"GARBAGE", b"", b"HTTP/1.1 100 Continue",
]  # fmt: skip
CHUNKED = [
    b"2800\r\n" + BODY + b"\r\n0\r\n\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"zz\r\n", b"5\r\nab",
    b"0\r\n\r\n", b"1" * 70_000,
]  # fmt: skip


def _answer(rng):
    """The bytes of an answer: now and then a good one, else wrong in several places."""
    status = STATUSES[0] if rng.random() < 0.5 else STATUSES[rng.integers(len(STATUSES))]
    headers = [LINES[place] for place in rng.integers(len(LINES), size=rng.integers(0, 4))]
    if rng.random() < 0.3:
        headers = [LINES[0]]
    bodies = [BODY, BODY[:-1], BODY + b"x", b"", BODY * 20, CHUNKED[rng.integers(len(CHUNKED))]]
    body = bodies[rng.integers(len(bodies))]
    answer = bytearray(b"\r\n".join([status, *headers, b"", body]))
    for place in rng.integers(len(answer), size=rng.integers(0, 3)) if rng.random() < 0.3 else []:
        answer[place] ^= 1 << int(rng.integers(8))
    return bytes(answer[: rng.integers(len(answer) + 1)] if rng.random() < 0.2 else answer)


def hostile_server(rng, number):
    """Answers that are wrong in any way: the file arrives whole, or DataError is raised and none is left."""
    from bilevax.data import DataError
    from bilevax.data.download import fetch

    answer = _answer(rng)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            with contextlib.suppress(OSError):  # the client has closed the connection
                self.wfile.write(answer)

    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server,
        tempfile.TemporaryDirectory(prefix="fault-") as place,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        target = Path(place, "file")
        options = {"schemes": ("http",), "pauses": (0.0,), "progress": False, "size_limit": LIMIT}
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/"
            fetch(url, target, sha256=hashlib.sha256(BODY).hexdigest(), **options)
        except DataError:
            pass
        finally:
            server.shutdown()
            thread.join()
        found = {path.name: path.read_bytes() for path in Path(place).iterdir()}
        if found not in ({}, {"file": BODY}):
            raise ViolationError(f"{sorted(found)} are left by an answer that begins {answer[:200]!r}")
        return RESUMED if found else REFUSED


@functools.cache
def _recommender():
    """The bytes of a saved recommender, and what it recommends."""
    from bilevax.applications.ranking import TopKRecommender
    from bilevax.data import generate

    table = generate.interactions(12, 20, 100, seed=0).table
    settings = {"users_per_step": 6, "positives": 2, "negatives": 4, "cutoff": 5}
    fitted = TopKRecommender("softmax", model="mf", width=2, epochs=1, held_out=0, settings=settings)
    fitted.fit(table, progress=None)
    with tempfile.TemporaryDirectory(prefix="fault-") as place:
        path = Path(place, "a.npz")
        fitted.save(path)
        return path.read_bytes(), _recommendations(fitted)


def _recommendations(recommender):
    return str([recommender.recommend(user, 3) for user in range(4)])


def tampered_recommender(rng, number):
    """Flipped, cut, added and exchanged bytes: ValueError, or the same recommendations."""
    from bilevax.applications.ranking import TopKRecommender

    whole, expected = _recommender()
    content = bytearray(whole)
    first, second = sorted(int(place) for place in rng.integers(0, len(content), 2))
    way = number % 4
    if way == 0:
        content[first] ^= 1 << int(rng.integers(8))
    elif way == 1:
        del content[first : second if rng.random() < 0.5 else first + 1]
    elif way == 2:
        content[first:first] = rng.bytes(int(rng.integers(1, 50)))
    else:
        content[first], content[second] = content[second], content[first]
    with tempfile.TemporaryDirectory(prefix="fault-") as place:
        path = Path(place, "a.npz")
        path.write_bytes(content)
        try:
            found = TopKRecommender.load(path)
        except ValueError:
            return REFUSED
        if _recommendations(found) != expected:
            raise ViolationError("another recommender was loaded")
    return RESUMED
