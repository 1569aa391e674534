"""Bodies that are too long, too slow or of the wrong kind: each is answered early and holds no resources."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.reliability.raw_server import AUTHORIZED, RawServer, raw_server, status, within

LIMIT = 1_000_000  # bytes of a body
BODY_TIMEOUT = 1.0  # seconds
LINGER = 1.0  # seconds that a refused body is read on for; the server's own
MARGIN = 15.0  # seconds; the machine may be busy
TINY_CHUNK = b"1\r\nx\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    limits = ("--max-body-bytes", str(LIMIT), "--body-timeout", str(BODY_TIMEOUT), "--keep-alive-timeout", "3")
    with raw_server(*limits) as server:
        yield server


def head(path: str, *lines: str, key: bool = True) -> bytes:
    text = "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *lines))
    return text.encode() + b"\r\n" + (AUTHORIZED if key else b"") + b"\r\n"


def chunk(size: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, bytes(size))


def test_a_declared_length_over_the_limit_is_refused_before_its_first_byte(server: RawServer) -> None:
    seconds = []
    while len(seconds) < 5 and min(seconds, default=LINGER) > LINGER / 2:  # the machine may be busy
        with server.connect() as raw:
            raw.sendall(head("/generate", f"Content-Length: {LIMIT + 1}"))
            began = time.monotonic()
            answer = b""
            while b"}}" not in answer:  # all of it, not its head alone
                data = raw.recv(4096)
                assert data, answer
                answer += data
            seconds.append(time.monotonic() - began)
        assert status(answer) == 413
    assert min(seconds) < LINGER / 2


@pytest.mark.parametrize("declared", [True, False])
def test_a_flood_of_a_body_is_refused_early_and_never_held(server: RawServer, declared: bool) -> None:
    """200 MB at a limit of 1 MB: the answer comes while most of it is still to be sent."""
    size, before = 200_000_000, server.memory()
    length = f"Content-Length: {size}" if declared else "Transfer-Encoding: chunked"
    piece = bytes(100_000) if declared else chunk(100_000)
    pieces = itertools.chain([head("/generate", length)], itertools.repeat(piece, size // 100_000))
    with server.connect() as raw:
        flooded = server.flood(raw, pieces)
    assert flooded.status in (413, 0)  # 0: the connection was reset before the answer was read
    assert flooded.sent < size
    assert server.memory() - before < 40_000_000


@pytest.mark.slow
def test_a_body_over_the_limit_in_tiny_chunks(server: RawServer) -> None:
    before = server.memory()
    pieces = itertools.chain([head("/generate", "Transfer-Encoding: chunked")], itertools.repeat(TINY_CHUNK * 1000))
    with server.connect() as raw:
        flooded = server.flood(raw, pieces)
    assert flooded.status in (408, 413)  # a busy machine may not have taken a million chunks in time
    assert server.memory() - before < 40_000_000


REFUSED = {
    "no such path": (head("/nowhere", "Transfer-Encoding: chunked"), 404),
    "no such method": (head("/health", "Transfer-Encoding: chunked"), 405),
    "no key": (head("/generate", "Transfer-Encoding: chunked", key=False), 401),
    "no JSON": (head("/generate", "Transfer-Encoding: chunked", "Content-Type: text/plain"), 415),
    "a foreign page": (head("/generate", "Transfer-Encoding: chunked", "Origin: http://evil.example"), 403),
    "no body needed": (head("/flush_cache", "Transfer-Encoding: chunked"), 200),
}


def test_what_is_answered_before_its_body_gives_its_connection_back(server: RawServer) -> None:
    """More chunks than the queue between connection and application holds, and the application reads none."""
    with ExitStack() as open_ones:
        asked = []
        for (what, (request, expected)), ends in itertools.product(REFUSED.items(), (True, False)):
            for _ in range(5):
                raw = open_ones.enter_context(server.connect())
                raw.sendall(request + TINY_CHUNK * 1000 + (b"0\r\n\r\n" if ends else b""))
                asked.append((what, expected, raw))
        for what, expected, raw in asked:
            answered = server.flood(raw, iter(()))
            assert answered.status == expected, what
            assert answered.seconds < LINGER + MARGIN, what
    assert within(MARGIN, lambda: server.connections() == 0)


@pytest.mark.slow
def test_a_body_of_a_byte_now_and_then_is_dropped_and_holds_nothing_up(server: RawServer) -> None:
    slow = head("/generate", "Content-Length: 500000")
    with ExitStack() as open_ones:
        others = [open_ones.enter_context(server.connect()) for _ in range(50)]
        for raw in others:
            raw.sendall(slow + b"{")
        began = time.monotonic()
        response = server.client.post("/generate", json={"prompt": "The capital of France is", "stream": False})
        assert response.status_code == 200
        assert time.monotonic() - began < MARGIN
        with server.connect() as raw:
            dribbled = server.flood(raw, itertools.chain([slow], itertools.repeat(b" ")), pause=0.05)
        silent = [server.flood(raw, iter(())) for raw in others]
    assert [one.status for one in (dribbled, *silent)] == [408] * 51
    assert dribbled.first is not None
    assert BODY_TIMEOUT * 0.9 < dribbled.first < BODY_TIMEOUT + MARGIN
    assert dribbled.seconds < BODY_TIMEOUT + LINGER + MARGIN
    assert b"within 1 seconds" in dribbled.answer
    assert server.at_rest()
