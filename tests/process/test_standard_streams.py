"""Standard output and error whose reader has left or does not read."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pytest

from aengine.process.pipe_writer import MAX_WAITING_BYTES
from aengine.process.standard_streams import LossyStream, lossy_streams


class Dead(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError("no space left on device")


@pytest.mark.parametrize("stream", [Dead(), None])
def test_unread_text_is_dropped(stream: Dead | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(LossyStream, "discard", LossyStream.flush)
    with lossy_streams():
        print("a line", file=sys.stderr, flush=True)
        assert sys.stderr.write("two") == 3
        sys.stderr.flush()
    assert sys.stderr is stream


def test_read_text_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    with lossy_streams(), lossy_streams():
        print("out", flush=True)
        print("err", file=sys.stderr)
        assert sys.stderr.encoding
        assert not sys.stderr.isatty()
    assert capsys.readouterr() == ("out\n", "err\n")


@pytest.mark.parametrize("output", ["full disk", "no reader", "none at all"])
def test_a_process_ends_as_if_it_had_been_heard(output: str) -> None:
    code = """if True:
        import sys, traceback
        from aengine.process.standard_streams import lossy_streams
        with lossy_streams():
            for number in range(3000):
                print("a line of output", number)
                print("a line of errors", number, file=sys.stderr, flush=True)
            traceback.print_exception(ValueError("x"))
        sys.exit(7)
    """
    command = [sys.executable, "-c", code]
    if output == "full disk":
        with open("/dev/full", "w") as full:
            assert subprocess.run(command, stdout=full, stderr=full, timeout=30, check=False).returncode == 7
    elif output == "no reader":
        reader, writer = os.pipe()
        os.close(reader)
        assert subprocess.run(command, stdout=writer, stderr=writer, timeout=30, check=False).returncode == 7
        os.close(writer)
    else:
        shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        assert subprocess.run(shell, timeout=30, check=False).returncode == 7


@contextmanager
def pipe_as(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryIO]:
    """The reading end of `sys.stdout` or `sys.stderr`."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as out, os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, name, stream)
        yield out


def write_lines(count: int) -> threading.Thread:
    def write() -> None:
        for number in range(count):
            print(f"{number:099}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def test_a_pausing_reader_blocks_no_writer_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe_as("stderr", monkeypatch) as out, lossy_streams():
        writing = write_lines(3000)  # 300 kB; the pipe holds 64
        writing.join(10)
        assert not writing.is_alive()
        assert [int(out.readline()) for _ in range(3000)] == list(range(3000))
        print("at once", file=sys.stderr)
        assert out.readline() == b"at once\n"


def test_waiting_data_is_bounded_and_dropped_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe_as("stderr", monkeypatch) as out, lossy_streams():
        writing = write_lines(30_000)
        writing.join(20)
        assert not writing.is_alive()
        came = 0
        while not (line := out.readline()).startswith(b"aengine"):
            assert int(line) == came
            came += 1
        assert line == b"aengine: %d lines were dropped here, because nobody read them\n" % (30_000 - came)
        assert MAX_WAITING_BYTES < came * 100 < MAX_WAITING_BYTES + 2**18


def test_a_process_does_not_wait_for_a_reader_that_does_not_read() -> None:
    code = "from aengine.process.standard_streams import lossy_streams\nwith lossy_streams():\n  print('x' * 10**6)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.wait(30) == 0
