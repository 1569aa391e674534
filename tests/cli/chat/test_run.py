"""`aengine chat` on a pseudo-terminal, and with a pipe as input."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.running import AENGINE, Served, environment, run, served


class Terminal:
    """A program on a pseudo-terminal. Reads its output and types its input."""

    def __init__(self, ours: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._ours = ours
        self._shown = ""  # after the last text that was found

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def says(self, *lines: str) -> None:
        """Type each line when its prompt is shown. Ctrl-C would discard input that was typed earlier."""
        for line in lines:
            self.shows("> ")
            self.type(f"{line}\n")
            self.shows(f"{line}\r\n")

    def rests(self) -> None:
        """Wait until its main thread sleeps. readline receives signals only while it waits for a key."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            pass

    def shows(self, text: str) -> str:
        """Wait for `text`, and return the output up to its end."""
        deadline = time.monotonic() + 40
        while text not in (shown := self._shown):
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} is not shown, but {shown!r}"
            try:
                self._shown += os.read(self._ours, 4096).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"it ended without {text!r}: {shown!r}") from error
        seen, found, self._shown = shown.partition(text)
        return seen + found


@contextmanager
def terminal(state: Path, *args: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [*AENGINE, "chat", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(XDG_STATE_HOME=str(state), TERM="xterm"),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal to it
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tmp_path: Path) -> None:
    with terminal(tmp_path) as shell:
        shell.shows("/help shows the commands")
        shell.says("/set ignore_eos true", "/set max_tokens 1500", "Tell me a story.")
        shell.shows(" ")  # in the middle of the answer
        shell.type("\x03")
        shell.shows("[stopped]")
        shell.shows("> ")
        shell.type("half a li")
        shell.shows("half a li")
        shell.rests()
        shell.type("\x03")  # at the prompt it gives up the line
        shell.says("/set ignore_eos false", "/set temperature 0", "/reset", "What is 17 + 25?")
        answer = shell.shows("from the cache]")
        assert "17 + 25 = 42." in answer
        assert "\x1b[2m" in answer
        shell.shows("> ")
        shell.type("\x04")
        assert shell.process.wait(20) == 0
    history = (tmp_path / "aengine" / "chat_history").read_text()
    assert "What is 17 + 25?" in history
    assert (tmp_path / "aengine" / "chat_history").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_line_of_a_pipe_that_has_no_answer_fails_the_command() -> None:
    done = run("chat", "--adapter", "nope", given="hi\n")
    assert "[the adapter 'nope' is not loaded" in done.stdout
    assert done.returncode == 1


def running(server: Served) -> float:
    (line,) = (
        line for line in server.client.get("/metrics").text.splitlines() if line.startswith("aengine_requests_running ")
    )
    return float(line.split()[1])


@pytest.mark.slow
def test_through_a_server(tmp_path: Path) -> None:
    with served() as server:
        done = run("chat", "--url", server.url, "--temperature", "0", given="What is 17 + 25?\n", AENGINE_DEVICE="")
        assert done.stdout.startswith("17 + 25 = 42.\n[12 tokens, ")
        assert done.returncode == 0
        with terminal(tmp_path, "--url", server.url) as shell:
            shell.shows(f"aengine-demo on {server.url}")
            shell.type("/set ignore_eos true\n/set max_tokens 1500\nTell me a story.\n")
            while (
                " 1.0" not in server.client.get("/metrics").text.split("aengine_requests_running")[-1].splitlines()[0]
            ):
                pass
            shell.type("\x03")
            shell.shows("[stopped]")
            deadline = time.monotonic() + 20
            while (
                " 0.0" not in server.client.get("/metrics").text.split("aengine_requests_running")[-1].splitlines()[0]
            ):
                assert time.monotonic() < deadline
            shell.says("/quit")
            assert shell.process.wait(20) == 0


@pytest.mark.parametrize(
    ("args", "status", "told"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "cannot be reached"),
        pytest.param(["/nonexistent/model"], 1, "/nonexistent/model", marks=pytest.mark.slow),
        (["--top-p", "much"], 2, "top_p"),
    ],
)
def test_errors_are_one_sentence(args: list[str], status: int, told: str) -> None:
    done = run("chat", *args)
    assert done.returncode == status
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
