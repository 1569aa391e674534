"""`aengine serve 2>&1 | head`, and a full disk: a log that cannot be written does not affect serving."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tests.cli.running import environment
from tests.free_port import free_port

SECONDS = 60.0
LONG = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 200}
SERVERS = {
    "serve": ("aengine", "serve", "--port", "{port}"),
    "hypercorn": ("hypercorn", "--graceful-timeout", "20", "-b", "127.0.0.1:{port}", "aengine.app:app"),
}


@contextmanager
def unheard(server: str, full_disk: bool) -> Iterator[tuple[subprocess.Popen[bytes], httpx2.Client]]:
    port = free_port()
    if full_disk:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    command = [sys.executable, "-m", *(word.format(port=port) for word in SERVERS[server])]
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(AENGINE_TORCH_THREADS="1"))
    os.close(output)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def ready(client: httpx2.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("server", "full_disk"), [("serve", False), ("serve", True), ("hypercorn", False)])
def test_it_loads_and_serves_and_ends_as_ever(server: str, full_disk: bool) -> None:
    with unheard(server, full_disk) as (process, client):
        end = time.monotonic() + SECONDS
        while not ready(client):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        with client.stream("POST", "/generate", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            said = list(lines)
        assert process.wait(timeout=30) == 0
    if server == "serve":
        assert said[-2:] == ["data: [DONE]", ""]
