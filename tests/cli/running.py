"""Runs the command line in a process of its own, like a user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

AENGINE = [sys.executable, "-m", "aengine"]


def environment(**given: str) -> dict[str, str]:
    """Return the environment without its own knobs, and with small defaults."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AENGINE_")}
    return {**kept, "AENGINE_DEVICE": "cpu", "AENGINE_KV_CACHE_GIB": "0.1", **given}


def run(*args: str, given: str | bytes = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, with `given` on standard input."""
    text = given if isinstance(given, bytes) else given.encode()
    done = subprocess.run(
        [*AENGINE, *args], input=text, capture_output=True, env=environment(**env), timeout=60, check=False
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Served:
    """A server process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: list[str] = []
        self.url = ""
        assert process.stdout is not None
        for line in process.stdout:
            self.told.append(line)
            if line.startswith("Serving on "):
                self.url = line.split()[2]
            if "curl" in line:
                break
        assert self.url, "".join(self.told)
        self.client = httpx2.Client(base_url=self.url, timeout=30, trust_env=False, verify=False)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end. Return the exit status, and the output since the start."""
        rest, _ = self.process.communicate(timeout=30)
        return self.process.returncode, rest

    def wait_for(self, text: str) -> None:
        """Wait until the server prints this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was never printed:\n{''.join(self.told)}")


def _hear_hang_ups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and a child would inherit that


@contextmanager
def served(*args: str) -> Iterator[Served]:
    """A ready `aengine serve` with the demo model."""
    process = subprocess.Popen(
        [*AENGINE, "serve", "--port", "0", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment(),
        text=True,
        preexec_fn=_hear_hang_ups,
    )
    try:
        server = Served(process)
        with server.client:
            yield server
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)
