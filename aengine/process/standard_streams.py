"""Standard output and error that never raise and never block.

With `aengine serve 2>&1 | head -3`, or a full disk, any print would otherwise raise, for example in the task that loads
the model or in the one that handles signals. If the reader of a pipe stops reading, a print would block the event loop
as soon as the pipe is full.
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

_EXIT_SECONDS = 1.0  # in which waiting data is written when the process exits


class LossyStream:
    """A text stream that drops text that cannot be written, and tries again with the next text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pipe = _pipe_writer(stream)

    def write(self, text: str) -> int:
        if self._pipe is not None:
            self._pipe.write(text.encode(self._stream.encoding, "backslashreplace"))
            return len(text)
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream has been closed
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return

    def discard(self) -> None:
        """Flush. If that fails, redirect to the null device, so that the interpreter's own flush at exit succeeds."""
        if self._pipe is not None:
            self._pipe.wait(_EXIT_SECONDS)
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
    """Return a writer for a stream whose reader may stop: a pipe, a socket or a terminal. None for a file."""
    try:
        stream.flush()
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return None
    has_reader = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
    return PipeWriter(descriptor) if has_reader and sys.platform != "win32" else None
