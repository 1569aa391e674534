"""Requests that are malformed, oversized or dribbled, and requests that try to get around the API key."""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.one_in import one_in
from tests.reliability.raw_server import AUTHORIZED, RawServer, raw_server, status, within

HEADER_TIMEOUT = 2.0  # seconds: --keep-alive-timeout
MARGIN = 15.0  # seconds; the machine may be busy
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + AUTHORIZED
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + AUTHORIZED
BODY = b'{"prompt":"a"}'
CHUNKED = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    # Of any host, so that names in it get as far as the key.
    with raw_server(
        "--keep-alive-timeout", str(HEADER_TIMEOUT), "--body-timeout", "1", "--allowed-hosts", "*"
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(server: RawServer) -> Iterator[None]:
    yield
    assert within(MARGIN, lambda: server.connections() == 0)
    assert within(MARGIN, server.at_rest)


REQUEST_LINES = [
    b"GET",
    b"GET /version",
    b"GET  /version HTTP/1.1",
    b"GET /version HTTP/1.1 x",
    b"GET /ver sion HTTP/1.1",
    b"GET /version http/1.1",
    b"GET /version FTP/1.1",
    b"G\x00T /version HTTP/1.1",
    b"GET /\xff HTTP/1.1",
    b"GET /\x00 HTTP/1.1",
    b"GET /\x7f HTTP/1.1",
    b" GET /version HTTP/1.1",
    b"\r\n\r\nGET /version HTTP/1.1",
    b"/version HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b'{"prompt":"a"}',
    b"\x00" * 100,
    b"GET /version HTTP/2.0",
]


@pytest.mark.parametrize("line", one_in(3, REQUEST_LINES))
def test_a_bad_request_line_ends_the_connection(server: RawServer, line: bytes) -> None:
    answer = server.ask(line + b"\r\nHost: localhost\r\nConnection: close\r\n" + AUTHORIZED + b"\r\n")
    assert status(answer) == (505 if b"HTTP/2.0" in line else 400)


LENGTHS = [
    *(
        b"Content-Length: " + value
        for value in (b"-1", b"+14", b"0x0e", b"1_4", b"14;", b"\xb2", b"9" * 30, b"9" * 5000)
    ),
    b"Content-Length: 14\r\nContent-Length: 15",
    b"Content-Length: 14, 15",
    b"Content-Length : 14",
    *(
        b"Transfer-Encoding: " + value
        for value in (b"xchunked", b"chunked, identity", b"\x0bchunked", b"chunked\r\n ,x")
    ),
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Content-Length: 14\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4",
    b"Content-Length: 14\r\nTransfer-Encoding: identity",
]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_nothing_is_smuggled_past_a_doubtful_length(server: RawServer, lengths: bytes) -> None:
    """One answer, a refusal, and the connection is over: what follows is never read as a request."""
    answer = server.ask(POST + lengths + b"\r\n\r\n" + CHUNKED + GET + b"\r\n")
    assert status(answer) in (400, 501)
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "size", one_in(4, [b"f" * 16, b"f" * 21, b"-1", b"0x5", b"5;" + b"x" * 100_000, b"g", b"", b" 5"])
)
def test_chunk_sizes_that_no_client_sends(server: RawServer, size: bytes) -> None:
    answer = server.ask(POST + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\nabcde\r\n")
    assert status(answer) in (400, 408, 431)  # 408: the rest of a chunk of 2^64 bytes never came


def test_http_1_0_is_answered_and_closed(server: RawServer) -> None:
    assert server.ask(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    body = b'{"prompt": "One two three", "max_tokens": 8, "temperature": 0}'
    head = b"POST /generate HTTP/1.0\r\nContent-Length: %d\r\n%s\r\n" % (len(body), AUTHORIZED)
    answer = server.ask(head + body)
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "flood",
    [
        b"".join(b"X-%d: a\r\n" % i for i in range(100_000)),
        b"X: " + bytes(b"a" * 10_000_000),
        b"Cookie: " + b"a=b; " * 1_000_000,
        b"a\r\n" * 100_000,
    ],
    ids=["many", "large", "cookies", "no headers at all"],
)
def test_a_flood_of_headers_is_refused(server: RawServer, flood: bytes) -> None:
    before = server.memory()
    answer = server.ask(GET + flood + b"\r\n")
    assert status(answer) in (0, 400, 431)  # 0: the connection was reset before the answer was read
    assert server.memory() - before < 20_000_000


def test_headers_that_never_end_are_refused(server: RawServer) -> None:
    line = b"X-Header: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 10
    with server.connect() as raw:
        flooded = server.flood(raw, itertools.chain([GET], itertools.repeat(line)), pause=0.001)
    assert flooded.status in (0, 431)
    assert flooded.sent < 2_000_000


@pytest.mark.parametrize("first", one_in(4, [GET + b"X-Id: a", b"", b"GET /vers", GET]))
def test_slow_headers_are_dropped_and_hold_nothing_up(server: RawServer, first: bytes) -> None:
    """A byte now and then, or none at all: the connection is closed after the keep-alive timeout, whatever comes."""
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(server.connect()) for _ in range(20)]
        for raw in silent:
            raw.sendall(first)
        begun = time.monotonic()
        with server.connect() as raw:
            dribble = itertools.repeat(b"a") if first else iter(())
            flooded = server.flood(raw, itertools.chain([first], dribble), pause=0.05)
        assert server.client.get("/health").status_code == 200
        ends = [server.flood(raw, iter(())) for raw in silent]
    assert HEADER_TIMEOUT * 0.9 < flooded.seconds < HEADER_TIMEOUT + MARGIN
    assert time.monotonic() - begun < HEADER_TIMEOUT + MARGIN
    assert {end.answer for end in (flooded, *ends)} == {b""}


@pytest.mark.slow
def test_a_second_request_may_not_be_slower_than_the_first(server: RawServer) -> None:
    with server.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        flooded = server.flood(raw, itertools.repeat(b"a"), pause=0.05)
    assert flooded.answer.count(b"HTTP/1.1 ") == 1
    assert flooded.seconds < HEADER_TIMEOUT + MARGIN


TARGETS = [
    *(b"/v1/models", b"/metrics", b"/version", b"/openapi.json", b"/generate", b"/v1/chat/completions"),
    *(b"/flush_cache", b"/tokenize", b"/abort"),
    *(b"//health", b"//", b"/health/", b"/health/.", b"/health/../v1/models", b"/health/%2e%2e/v1/models",),
    b"/./metrics",
    *(b"/health%2f..%2fmetrics", b"/health%2F%2E%2E%2Fmetrics", b"/health..", b"/health.", b"/HEALTH", b"/Health"),
    *(b"/health%00", b"/health%20", b"/health%0a", b"/health%23", b"/health%3f", b"/health;x", b"/health\\..\\metrics"),
    *(b"/%68ealth/metrics", b"/%2568ealth", b"/%c0%afhealth", b"/%e2%80%8bhealth", b"/metrics?/health"),
    b"/metrics?x=/",
    *(b"/metrics#/health", b"/metrics%3f/health", b"/metrics;/health", b"/metrics/../health", b"/metrics/"),
    *(b"/.", b"/.."),
    *(b"http://x/health", b"http://x/metrics", b"http://health", b"http://x", b"//x/metrics", b"https://x:1/health"),
    *(b"health", b"metrics", b"*", b"x:443", b"?", b"?/health", b"#", b"/v1", b"/v1/", b"/v1/models/../../health"),
]  # fmt: skip
HOSTS = [
    b"Host: localhost",
    b"Host: localhost/health?",
    b"Host: /health",
    b"Host: health#",
    b"Host: x\r\nX-Forwarded-Prefix: /health\r\nX-Forwarded-Host: x/health?\r\nForwarded: host=health",
    b"Host: x\r\nX-Original-URL: /health\r\nX-Rewrite-URL: /health\r\nX-Forwarded-Uri: /health",
    b"Host: x\r\nX-HTTP-Method-Override: GET\r\nX-Script-Name: /metrics\r\nReferer: http://x/health",
    b"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
]  # fmt: skip


@pytest.mark.parametrize("method", one_in(4, ["GET", "HEAD", "OPTIONS", "PUT", "POST", "get", "TRACE", "FOO"]))
def test_nothing_but_the_open_paths_answers_without_the_key(server: RawServer, method: str) -> None:
    begun = server.figure("requests_total")
    for target, host in itertools.product(TARGETS, HOSTS):
        body = b'{"prompt":"a","model":"aengine-demo"}' if method == "POST" else b""
        length = b"Content-Length: %d\r\n" % len(body) if body else b""
        request = b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method.encode(), target, host, length)
        answer = server.ask(request + b"Connection: close\r\n\r\n" + body)
        assert status(answer) in (400, 401, 403), (request, answer[:300])
    assert server.figure("requests_total") == begun


@pytest.mark.parametrize("target", [b"/", b"/health", b"/ping", b"/ready"])
def test_the_open_paths_answer_get_alone_and_ping_also_post(server: RawServer, target: bytes) -> None:
    answered = {b"GET", b"HEAD", b"POST"} if target == b"/ping" else {b"GET", b"HEAD"}
    for method in (b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS"):
        answer = server.ask(b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % (method, target))
        assert status(answer) == (200 if method in answered else 405), method


USABLE = [b"trace-1", b"!#$%&'*+-.^_`|~", b'"<script>"', b"${jndi:ldap://x}", b"x" * 128]
UNUSABLE = [
    *(b"", b"x" * 129, b"a b", b"a\tb", b"\xff\xfe", "clé".encode(), "👋".encode(), b"a\x01b", b"a\x7fb"),
    b"a\x1b[31mb",
    *(b"a\r\n evil: 1", b"a\r\n\tevil: 1", b"%0d%0aevil: 1 "),
]  # fmt: skip


@pytest.mark.parametrize("given", USABLE + UNUSABLE)
def test_a_request_id_never_brings_anything_else_along(server: RawServer, given: bytes) -> None:
    answer = server.ask(GET + b"X-Request-Id: " + given + b"\r\n\r\n")
    ids = re.findall(rb"x-request-id: ([^\r\n]*)\r\n", answer)
    assert status(answer) == 200
    assert ids == [given] if given in USABLE else re.fullmatch(rb"[0-9a-f]{32}", ids[0]) and len(ids) == 1
    assert b"evil" not in answer


@pytest.mark.parametrize("given", [b"a\rb", b"a\r\n\r\nb", b"a\x00b", b"a\nevil: 1"])
def test_a_request_id_that_is_no_header_value(server: RawServer, given: bytes) -> None:
    answer = server.ask(GET + b"X-Request-Id: " + given + b"\r\n\r\n")
    assert status(answer) in (200, 400)  # 200: what follows the line break was a header of the request, or after it
    assert b"\nevil" not in answer


def completion(stream: bool, max_tokens: int, prompt: str = "One two three") -> bytes:
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked).encode()
    return (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n" % (len(body), AUTHORIZED) + body
    )


def test_pipelined_requests_are_all_answered_in_their_order(server: RawServer) -> None:
    lengths = [1, 7, 3, 2, 5]
    answer = server.ask(b"".join(completion(False, length) for length in lengths) + GET + b"\r\n")
    told = [int(found) for found in re.findall(rb'"completion_tokens":(\d+)', answer)]
    assert told == lengths
    assert answer.count(b"HTTP/1.1 200") == len(lengths) + 1


@pytest.mark.slow
def test_many_pipelined_requests(server: RawServer) -> None:
    answer = server.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
    assert answer.count(b"HTTP/1.1 200") == 500


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_half_closed_connections_are_aborted_and_give_everything_back(server: RawServer, stream: bool) -> None:
    """For this server, a client that has closed its sending side has left."""
    before = server.figure("generated_tokens_total")
    with ExitStack() as open_ones:
        connections = [open_ones.enter_context(server.connect()) for _ in range(20)]
        for number, raw in enumerate(connections):
            raw.sendall(completion(stream, 2000, f"Story {number}:"))
        assert within(MARGIN, lambda: server.figure("requests_running") == 20)
        for raw in connections:
            raw.shutdown(socket.SHUT_WR)
        for raw in connections:
            assert b"[DONE]" not in server.flood(raw, iter(())).answer
        assert within(MARGIN, server.at_rest)
        assert server.figure("generated_tokens_total") - before < 20 * 2000 / 2


@pytest.mark.slow
def test_pipelined_streams_whose_client_leaves_are_aborted(server: RawServer) -> None:
    connections = [server.connect() for _ in range(10)]
    for raw in connections:
        raw.sendall(completion(True, 2000) * 3)
    assert within(MARGIN, lambda: server.figure("requests_running") == 10)
    for raw in connections:
        raw.close()
    assert within(MARGIN, server.at_rest)
