"""More connections than descriptors: closed ones give theirs back at once, idle ones make room, busy ones stay."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.reliability.processes import connected, heard, process, told
from tests.reliability.raw_server import open_files, within

pytestmark = pytest.mark.slow

FEW = 128
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
ENDLESS = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 2000}


class Server(NamedTuple):
    port: int
    pid: int


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with process("tests.reliability.few_descriptors", str(FEW), "--port", "0") as running:
        yield Server(int(told(running, r"Serving on \S+:(\d+)")[1]), running.pid)


def answers(raw: socket.socket) -> bool:
    raw.sendall(VERSION)
    answer = b""
    while not answer.endswith(b"}"):
        data = raw.recv(4096)
        assert data, "the connection was closed"
        answer += data
    return answer.startswith(b"HTTP/1.1 200")


def test_closed_connections_give_their_descriptors_back(server: Server) -> None:
    before = open_files(server.pid)
    for number in range(4 * FEW):
        with connected(server.port) as raw:
            if number % 2:
                assert answers(raw)
    assert within(15, lambda: open_files(server.pid) <= before)


def test_idle_connections_make_room_and_a_running_stream_stays(server: Server) -> None:
    with ExitStack() as stack:
        stream = stack.enter_context(connected(server.port, "/generate", **ENDLESS))
        stream.recv(1)
        old = [stack.enter_context(connected(server.port)) for _ in range(20)]
        assert all(answers(raw) for raw in old)
        new = [stack.enter_context(connected(server.port)) for _ in range(2 * FEW)]
        assert answers(new[-1])
        assert open_files(server.pid) < FEW
        assert all(heard(raw) == b"" for raw in old)
        assert stream.recv(1)


@pytest.mark.slow
def test_serve_takes_the_descriptors_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))  # which the server inherits
    try:
        with process("aengine", "serve", "--port", "0") as running:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            port = int(told(running, r"Serving on \S+:(\d+)")[1])
            with ExitStack() as stack:
                held = [stack.enter_context(connected(port)) for _ in range(2 * FEW)]
                assert all(answers(raw) for raw in held)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
