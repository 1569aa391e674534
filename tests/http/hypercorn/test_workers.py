"""A second worker is refused with one sentence, and the server ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from aengine.errors import ConfigError
from aengine.http.hypercorn.workers import only_worker
from tests.free_port import free_port

SENTENCE = "aengine runs in one process, but the server started several workers"
HYPERCORN = [sys.executable, "-m", "hypercorn"]

STAND_IN = textwrap.dedent(
    """
    from aengine.app import create_app
    from tests.http.fake_engine import FakeEngine

    app = create_app(engine_factory=lambda config: FakeEngine())
    """
)


def environment(folder: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join([root, str(folder)])}


@pytest.mark.slow
def test_two_workers_of_one_hypercorn_are_refused(tmp_path: Path) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    port = free_port()
    done = subprocess.run(
        [*HYPERCORN, "-w", "2", "-b", f"127.0.0.1:{port}", "stand_in:app"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.count(SENTENCE) == 1
    assert "Traceback" not in done.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.slow
def test_two_servers_are_none_of_each_others_business(tmp_path: Path) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    servers = [
        subprocess.Popen(
            [*HYPERCORN, "-b", f"127.0.0.1:{free_port()}", "stand_in:app"],
            env=environment(tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for server in servers:
            assert server.stderr is not None
            assert any("Running on" in line for line in server.stderr)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert [server.returncode for server in servers] == [0, 0]


def _worker(entered: Event, leave: Event) -> None:
    try:
        with only_worker():
            entered.set()
            leave.wait(60)
    except ConfigError as error:
        raise SystemExit(3) from error


@pytest.mark.slow
def test_a_replacing_worker_gets_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When hypercorn replaces its worker, the next one starts as soon as the last one has ended in any way."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    for end in ("politely", "killed", "politely"):
        entered, leave = context.Event(), context.Event()
        first = context.Process(target=_worker, args=(entered, leave))
        first.start()
        assert entered.wait(60)
        second = context.Process(target=_worker, args=(entered, leave))
        second.start()
        second.join(60)
        assert second.exitcode == 3
        if end == "killed":
            first.kill()
        else:
            leave.set()
        first.join(60)
        assert first.exitcode == (-signal.SIGKILL if end == "killed" else 0)
    assert list(tmp_path.glob("aengine-*.lock")) == []


def test_a_process_without_siblings_needs_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with only_worker(), only_worker():
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_invalid_knob_is_reported_in_one_sentence(tmp_path: Path, workers: str) -> None:
    done = subprocess.run(
        [*HYPERCORN, "-w", workers, "-b", f"127.0.0.1:{free_port()}", "aengine.app:app"],
        env=environment(tmp_path) | {"AENGINE_PAGE_SIZE": "many"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "page_size" in done.stderr
    assert "AENGINE_PAGE_SIZE" in done.stderr
    assert "Traceback" not in done.stderr
    if workers == "0":  # with workers, hypercorn's exit status does not show it
        assert done.returncode == 1
