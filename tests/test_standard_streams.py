"""Standard output and error whose reader has died."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from aengine.standard_streams import LossyStream, lossy_streams


class Dead(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError("no space left on device")


@pytest.mark.parametrize("stream", [Dead(), None])
def test_what_nobody_reads_is_dropped(stream: Dead | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(LossyStream, "discard", LossyStream.flush)
    with lossy_streams():
        print("a line", file=sys.stderr, flush=True)
        assert sys.stderr.write("two") == 3
        sys.stderr.flush()
    assert sys.stderr is stream


def test_what_is_read_arrives(capsys: pytest.CaptureFixture[str]) -> None:
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
        from aengine.standard_streams import lossy_streams
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
