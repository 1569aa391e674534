"""Reads lines of a file or of a pipe asynchronously, without a thread that could not be stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

MAX_LINE_BYTES = 64 * 2**20
_READ_BYTES = 2**16


class LineTooLongError(Exception):
    """A line has more bytes than `MAX_LINE_BYTES`."""


async def read_lines(file: int) -> AsyncIterator[bytes]:
    """The lines of a file descriptor, without their line breaks. Raises `LineTooLongError`, which ends it."""
    pieces: list[bytes] = []  # of the line that has not ended
    held = 0
    while chunk := await _read(file):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            yield b"".join((*pieces, piece)).removesuffix(b"\r")
            pieces.clear()
            held = 0
        pieces.append(rest)
        held += len(rest)
        if held > MAX_LINE_BYTES:
            raise LineTooLongError
    if last := b"".join(pieces):
        yield last


async def _read(file: int) -> bytes:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(file, readable.set)
    except PermissionError:  # a file on a disk: never keeps anybody waiting
        await asyncio.sleep(0)
        return os.read(file, _READ_BYTES)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)
    return os.read(file, _READ_BYTES)
