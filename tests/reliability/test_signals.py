"""Stop signals: streams finish or get an error, no client can keep the process alive, and the status is 0."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.reliability.processes import connected, heard, process, told

pytestmark = pytest.mark.slow
ENDLESS = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 2000}
SERVE = ("aengine", "serve", "--port", "0")
HALF_A_BODY = b'POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"prompt": '


@contextmanager
def lingering(port: int) -> Iterator[dict[str, socket.socket]]:
    """Clients in every state at the time of the signal."""
    there = {
        "idle": connected(port),
        "half a head": connected(port),
        "half a body": connected(port),
        "stalled": connected(port, receive_buffer=4096),
        "streaming": connected(port, "/generate", **ENDLESS),
        "whole": connected(port, "/generate", **ENDLESS, stream=False),
    }
    there["half a head"].sendall(b"POST /generate HTTP/1.1\r\nHost:")
    there["half a body"].sendall(HALF_A_BODY)
    there["streaming"].recv(1)
    there["stalled"].sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)  # and never reads
    with ExitStack() as stack:
        for raw in there.values():
            stack.enter_context(raw)
        yield there


def check(there: dict[str, socket.socket]) -> None:
    """The rest of each connection after the server has left; `stalled` may have been reset."""
    assert heard(there["idle"]) == b""
    assert heard(there["half a head"]) == b""
    streamed = heard(there["streaming"])
    assert b'"shutting_down"' in streamed
    assert streamed.endswith(b"0\r\n\r\n")
    whole = heard(there["whole"])
    assert whole.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in whole
    half = heard(there["half a body"])
    assert half.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in half


@pytest.mark.parametrize("second", [False, True])
def test_serve_leaves_within_its_bound_whoever_holds_on(second: bool) -> None:
    """After --shutdown-timeout, or at the second signal."""
    with process(*SERVE, "--shutdown-timeout", "60" if second else "0.5") as running:
        port = int(told(running, r"Serving on \S+:(\d+)")[1])
        with lingering(port) as there:
            began = time.monotonic()
            running.send_signal(signal.SIGTERM)
            told(running, "no new requests")
            if second:
                running.send_signal(signal.SIGTERM)
            said, _ = running.communicate(timeout=30)
            took = time.monotonic() - began
            check(there)
    assert running.returncode == 0
    assert "Traceback" not in said
    assert took < 20  # 13 at most, and what a busy machine takes


def test_a_terminal_that_closes_ends_no_server_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the server inherits
    try:
        with process(*SERVE) as running:
            signal.signal(signal.SIGHUP, before)
            port = int(told(running, r"Serving on \S+:(\d+)")[1])
            running.send_signal(signal.SIGHUP)
            with connected(port, "/generate", prompt="One two", max_tokens=4, stream=False) as raw:
                assert raw.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_bare_hypercorn_ends_streams_with_an_error_event(workers: str) -> None:
    command = ("hypercorn", "-w", workers, "--graceful-timeout", "1", "-b", "127.0.0.1:0", "aengine.app:app")
    with process(*command) as running:
        port = int(told(running, r"Running on \S+:(\d+)")[1])
        told(running, "is ready after")
        with lingering(port) as there:
            began = time.monotonic()
            running.send_signal(signal.SIGTERM)
            said, _ = running.communicate(timeout=30)
            took = time.monotonic() - began
            check(there)
    assert running.returncode == 0
    assert "Traceback" not in said
    assert took < 25


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_can_be_stopped_while_the_model_loads(number: signal.Signals) -> None:
    """Once: when the loading is over, which cannot be interrupted. Twice: at once."""
    with process("tests.reliability.slow_start", "1.5", "--port", "0") as running:
        told(running, "loading begins")
        running.send_signal(number)
        said, _ = running.communicate(timeout=30)
    assert running.returncode == 0
    assert "Traceback" not in said
    assert "Serving on" not in said
    with process("tests.reliability.slow_start", "60", "--port", "0") as running:
        told(running, "loading begins")
        began = time.monotonic()
        running.send_signal(number)
        told(running, "stopping when the model is loaded")
        running.send_signal(number)
        said, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "leaving at once" in said
    assert time.monotonic() - began < 30
