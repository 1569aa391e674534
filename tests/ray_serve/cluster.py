"""A Ray cluster with replicas of the demo model, in its own processes, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.free_port import free_port

KNOBS = ("torch_threads=1", "progress=false", "accept_timeout=5", "vllm_metrics=true")


class Cluster:
    def __init__(self, process: subprocess.Popen[str], name: str, url: str) -> None:
        self._process = process
        self.name = name
        self.url = url

    def deploy(self, *knobs: str) -> None:
        """Deploy again with other knobs, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join([*KNOBS, *knobs]) + "\n")
        self._process.stdin.flush()
        self.wait_deployed()

    def wait_deployed(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "deployed\n":
                return
        raise RuntimeError(f"the driver ended with status {self._process.wait()}")

    def engines(self) -> list[int]:
        """Return the process ids of the engines."""
        title = f"ray::ServeReplica:{self.name}:engine"
        return [pid for pid, command in _processes() if command.startswith(title)]

    def kill_one(self) -> None:
        os.kill(self.engines()[0], signal.SIGKILL)

    def metric(self, name: str) -> dict[str, float]:
        """Return a metric's value for each replica."""
        text = httpx2.get(f"{self.url}/metrics", timeout=20).text
        found = re.findall(rf'^{name}\{{[^}}]*replica="(\w+)"\}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until the condition is true, and return the seconds. An HTTP error counts as false."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except httpx2.HTTPError:
            pass
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.05)


@contextmanager
def cluster(*knobs: str) -> Iterator[Cluster]:
    """A cluster. All its processes end with the context."""
    port = free_port()
    name = f"test{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ray_serve.driver", str(port), name, *KNOBS, *knobs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    running = Cluster(process, name, f"http://127.0.0.1:{port}")
    try:
        running.wait_deployed()
        yield running
    finally:
        if process.stdin is not None:
            process.stdin.close()
        family = _descendants(process.pid)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        until_gone(family)


def until_gone(family: set[int], seconds: float = 20) -> None:
    began = time.monotonic()
    while left := family & {pid for pid, _ in _processes()}:
        if time.monotonic() - began > seconds:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes of Ray were still there after {seconds} s")
        time.sleep(0.1)


def _processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if status[0] != "Z":
                    found.append((int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")))
            except OSError:
                continue
    return found


def _descendants(root: int) -> set[int]:
    """Return the process and all its descendants."""
    parents = {}
    for pid, _ in _processes():
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family
