"""Runs the chat shell on the terminal, with a history if readline is installed, or on a pipe."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from aengine.cli.chat.shell import Shell
from aengine.cli.images import Part, check_config_takes_images, check_takes_images, why_no_images
from aengine.cli.model import opened_model
from aengine.client import Client

_HISTORY_LINES = 1000


def chat(args: argparse.Namespace, sampling: dict[str, Any], images: list[Part]) -> int:
    """Run the chat shell until the user leaves it. Return 1 if the input is a pipe and an answer failed, else 0."""
    check_config_takes_images(args, images)
    return asyncio.run(_chat(args, sampling, images))


async def _chat(args: argparse.Namespace, sampling: dict[str, Any], images: list[Part]) -> int:
    async with opened_model(args) as model:
        check_takes_images(model, images)
        before_line = None
        if isinstance(model, Client):
            place = f"{await model.served_model()} on {model.base_url}"
            before_line = model.requests_closed  # a stopped answer must end on the server
        else:
            place = f"{model.model_name} in this process"
        dim = _shows_styles(sys.stdout)
        shell = Shell(
            *(model, sys.stdout, sampling, args.system, args.adapter),
            dim=dim,
            before_line=before_line,
            images=images,
            no_images=why_no_images(model),
        )
        with _line_reader() as read:
            if sys.stdin.isatty():
                print(f"{place}; /help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves")
            await shell.run(read)
        return int(shell.has_failed and not sys.stdin.isatty())


@contextmanager
def _line_reader() -> Iterator[Callable[[str], str]]:
    """Provide a function that shows a prompt and reads a line.

    The function raises `EOFError` at the end of the input, and `KeyboardInterrupt` for Ctrl-C.
    """
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
        with suppress(OSError):  # the home folder may be read-only
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(path)


def _shows_styles(out: TextIO) -> bool:
    """Return whether the output understands escape sequences for styles."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _plain_line(prompt: str) -> str:
    if line := sys.stdin.readline():
        return line
    raise EOFError


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "aengine" / "chat_history"
