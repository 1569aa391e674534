"""Standard output and error that never raise, also when what reads them has died: a log is no reason to fail.

`aengine serve 2>&1 | head -3` and a full disk would otherwise end whatever happens to say something: the task that
loads the model, a progress bar, the task that obeys signals. A reader that lives and does not read would stop the
event loop as soon as its pipe is full.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from aengine.process.pipe_writer import PipeWriter

_LAST_WORDS = 1.0  # seconds for what waits when the process exits


class LossyStream:
    """A text stream that drops what cannot be written, and tries again with what comes next."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pipe = _pipe_writer(stream)

    def write(self, text: str) -> int:
        if self._pipe is not None:
            self._pipe.write(text.encode(self._stream.encoding, "backslashreplace"))
            return len(text)
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it has been closed
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return

    def discard(self) -> None:
        """Flush, or send what could not be written to the null device, so that the interpreter does not stumble over it
        when it exits.
        """
        if self._pipe is not None:
            self._pipe.wait(_LAST_WORDS)
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except ValueError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_streams() -> Iterator[None]:
    """A context in which `sys.stdout` and `sys.stderr` never raise."""
    output, errors = sys.stdout, sys.stderr
    lossy = _lossy(output), _lossy(errors)
    sys.stdout, sys.stderr = cast(TextIO, lossy[0]), cast(TextIO, lossy[1])
    try:
        yield
    finally:
        for stream in lossy:
            stream.discard()
        sys.stdout, sys.stderr = output, errors


def _lossy(stream: TextIO | LossyStream | None) -> LossyStream:
    if isinstance(stream, LossyStream):
        return stream
    # None: closed before the process began (`2>&-`).
    return LossyStream(io.StringIO() if stream is None else stream)


def _pipe_writer(stream: TextIO) -> PipeWriter | None:
    """One for a stream that somebody reads, who may stop: not for a file."""
    try:
        stream.flush()
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return None
    read = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    return PipeWriter(descriptor) if read and sys.platform != "win32" else None
