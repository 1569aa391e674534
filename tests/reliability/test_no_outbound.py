"""A server with a local model makes no connection and looks up no name. It binds only its own socket, and never
unpickles.

An audit hook of Python records this from before the first line of aengine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from aengine.model.loading.hub import DEMO
from tests.cli.running import environment

# Events go straight to a file: the program under test cannot lose them.
HOOK = """
import json, os, sys
record = os.open(os.environ["RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
watched = {"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
           "socket.gethostbyaddr", "socket.getnameinfo", "socket.sendmsg", "pickle.find_class", "subprocess.Popen",
           "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "urllib.Request", "http.client.connect"}
def hook(event, args):
    if event in watched:
        kept = [repr(one)[:200] for one in args if type(one).__name__ != "socket"]
        os.write(record, (json.dumps([event, kept]) + "\\n").encode())
sys.addaudithook(hook)
"""


@contextmanager
def recorded(folder: Path, *args: str, given: str = "") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The command line under the hook."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    (folder / "input").write_text(given)
    record = folder / "record"
    path = os.pathsep.join([str(folder / "hook"), *sys.path])
    env = environment(RECORD=str(record), PYTHONPATH=path, HF_HUB_OFFLINE="0")
    env.pop("HF_HUB_OFFLINE")
    with (folder / "input").open() as text:
        process = subprocess.Popen(
            [sys.executable, "-m", "aengine", *args],
            stdin=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )
    try:
        yield process, record
    finally:
        process.kill()
        process.communicate(timeout=30)


def events(record: Path, *kinds: str) -> list[tuple[str, list[str]]]:
    """Return the recorded events of these kinds, without torch's search for CUDA libraries."""
    read = [json.loads(line) for line in record.read_text().splitlines()]
    found = [(event, args) for event, args in read if event.startswith(kinds)]
    return [(event, args) for event, args in found if event != "subprocess.Popen" or args[1] != LIBRARY_LOOKUP]


LIBRARY_LOOKUP = "['/sbin/ldconfig', '-p']"


def sockets_of(pid: int) -> dict[str, tuple[str, str]]:
    """The process's TCP and UDP sockets by the kernel's own tables: inode -> (local address, state)."""
    inodes = set()
    for name in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(name)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = {}
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                found[words[9]] = (f"{table} {words[1]}", words[3])
    return found


@pytest.mark.slow
def test_serve_a_folder(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    with recorded(tmp_path, "serve", "--port", "0", "--model", str(model)) as (process, record):
        assert process.stdout is not None
        url = next(line.split()[2] for line in process.stdout if line.startswith("Serving on "))
        port = int(url.rsplit(":", 1)[1])
        with httpx2.Client(base_url=url, timeout=30, trust_env=False) as client:
            assert "[DONE]" in client.post("/generate", json={"prompt": "One two", "max_tokens": 4}).text
            chat = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
            assert client.post("/v1/chat/completions", json=chat | {"max_tokens": 8}).status_code == 200
            assert client.get("/").status_code == client.get("/metrics").status_code == 200
        listening = {address: state for address, state in sockets_of(process.pid).values() if state in ("0A", "07")}
        assert listening.pop(f"tcp 0100007F:{port:04X}") == "0A"  # 0A: listening; 07: an open UDP socket
        # ::1 if there is IPv6: some clients resolve localhost to it
        assert listening in ({}, {f"tcp6 00000000000000000000000001000000:{port:04X}": "0A"})
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    bound = events(record, "socket.bind")
    first, *more = (args for _, args in bound)
    assert first == ["('127.0.0.1', 0)"]
    assert more in ([], [[f"('::1', {port})"]])
    assert events(record, "socket.connect", "socket.send", "socket.gethost", "socket.getname", "urllib", "http") == []
    assert [args[:2] for _, args in events(record, "socket.getaddrinfo")] == [["'127.0.0.1'", "0"]]
    assert events(record, "pickle", "subprocess", "os.") == []


@pytest.mark.slow
def test_generate_with_the_embedded_model(tmp_path: Path) -> None:
    with recorded(tmp_path, "generate", "--max-tokens", "4", given='"One two"\n') as (process, record):
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0, told
    assert events(record, "socket.", "urllib", "http", "pickle", "subprocess", "os.") == []


def test_the_record_is_kept(tmp_path: Path) -> None:
    """What the tests above rely on: the same hook sees a connection and an unpickling."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    code = "import pickle, socket; pickle.loads(pickle.dumps(print)); socket.socket().connect_ex(('127.0.0.1', 9))"
    env = environment(RECORD=str(tmp_path / "record"), PYTHONPATH=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], env=env, timeout=30, check=True)
    seen = {event for event, _ in events(tmp_path / "record", "pickle", "socket")}
    assert seen == {"pickle.find_class", "socket.connect"}
