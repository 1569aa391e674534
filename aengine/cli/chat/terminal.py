"""Reads lines from the terminal: with history where readline is there, plainly where there is no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_HISTORY_LINES = 1000


@contextmanager
def line_reader() -> Iterator[Callable[[str], str]]:
    """A function that shows a prompt and reads a line: raises `EOFError` at the end, `KeyboardInterrupt` for Ctrl-C."""
    if not sys.stdin.isatty():
        yield _plain_line
        return
    try:
        import readline  # makes `input` edit lines
    except ImportError:
        yield input
        return
    path = _history_file()
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield input
    finally:
        readline.set_history_length(_HISTORY_LINES)
        with suppress(OSError):  # a home that cannot be written to
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(path)


def shows_styles(out: TextIO) -> bool:
    """Whether the output shows styles for escape sequences."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _plain_line(prompt: str) -> str:
    if line := sys.stdin.readline():
        return line
    raise EOFError


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "aengine" / "chat_history"
