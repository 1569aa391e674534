"""A connection for every request: descriptors that hypercorn holds for a while do not run out."""

from __future__ import annotations

import os
import resource

import pytest

from tests.reliability.processes import connected, process, told

SOFT = 128


@pytest.mark.slow
def test_serve_takes_the_descriptors_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))  # which the server inherits
    try:
        with process("aengine", "serve", "--port", "0") as running:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            port = int(told(running, r"Serving on \S+:(\d+)")[1])
            for _ in range(2 * SOFT):
                with connected(port) as raw:
                    raw.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert raw.recv(4096).startswith(b"HTTP/1.1 200")
            assert len(os.listdir(f"/proc/{running.pid}/fd")) > SOFT  # else this test would show nothing
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
