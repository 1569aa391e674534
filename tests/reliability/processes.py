"""Servers as processes of their own, and raw connections to them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.cli.running import environment
from tests.http.serving import raw_request


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m command`, killed in the end if it is still there."""
    running = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment(AENGINE_TORCH_THREADS="1"),
        text=True,
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def told(running: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Wait until the process says so."""
    assert running.stdout is not None
    heard = []
    for line in running.stdout:
        heard.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"{pattern!r} was never said:\n{''.join(heard)}")


def connected(port: int, path: str | None = None, *, receive_buffer: int | None = None, **body: Any) -> socket.socket:
    """A connection, with a request on it if there is a path."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(20)
    raw.connect(("127.0.0.1", port))
    if path is not None:
        raw.sendall(raw_request(path, body))
    return raw


def heard(raw: socket.socket) -> bytes:
    """All that it says until it closes."""
    said = b""
    while data := raw.recv(65536):
        said += data
    return said
