"""Runs the lines of a file through a model: a bounded number at once, in bounded memory, with a progress bar."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, BinaryIO

import anyio.to_thread
import msgspec
from tqdm import tqdm

from aengine.cli.errors import CommandError, UsageError
from aengine.cli.generate.prompts import Result, answer_line
from aengine.cli.generate.requests import answer_request, is_request, post_to
from aengine.cli.images import Part, check_config_takes_images, check_takes_images
from aengine.cli.knobs import read_knobs
from aengine.cli.model import opened_model
from aengine.config import EngineConfig
from aengine.sizes import format_bytes

_SERVER_CONCURRENCY = 64
_WINDOW = 4  # results per running prompt that may wait for a slower prompt before them
MAX_LINE_BYTES = 64 * 2**20
_READ_BYTES = 2**16
_COUNT_BYTES = 2**20
_ONLY_PROMPTS = (
    "sampling flags, --adapter, --image and --token-ids apply to prompts only: a line with custom_id has all "
    "parameters in its body"
)


def generate(args: argparse.Namespace, sampling: dict[str, Any], images: list[Part]) -> int:
    """Answer every line. Return the exit status: 1 if any line could not be answered."""
    check_config_takes_images(args, images)
    with (
        _opened(args.input, "rb", sys.stdin.fileno()) as source,
        _opened(args.output, "wb", sys.stdout.fileno()) as out,
    ):
        failed = asyncio.run(_generate(args, sampling, images, source, out))
    if failed:
        print(f"aengine: {failed} {'lines' if failed > 1 else 'line'} could not be answered", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def _opened(path: str, mode: str, standard: int) -> Iterator[BinaryIO]:
    try:
        file = open(standard if path == "-" else path, mode, closefd=path != "-")  # noqa: SIM115 - the next line closes it
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    with file:
        yield file  # type: ignore[misc]  # the mode says binary


async def _generate(
    args: argparse.Namespace, sampling: dict[str, Any], images: list[Part], source: BinaryIO, out: BinaryIO
) -> int:
    failed = 0
    tokens = 0
    config = read_knobs(args, EngineConfig)
    show = config.progress
    concurrency = args.concurrency or (config.max_num_seqs if args.url is None else _SERVER_CONCURRENCY)
    defaults = sampling if args.adapter is None else sampling | {"adapter": args.adapter}
    if args.url is None and config.max_queue == 0:
        raise UsageError("max_queue is 0, so that no prompt may wait and none would run; leave it out")
    async with opened_model(args) as model:
        check_takes_images(model, images)
        post = cache(partial(post_to, model))  # called at the first request only
        total = await anyio.to_thread.run_sync(_count_lines, args.input) if show else None
        # disable=None: no bar if standard error is no terminal
        with tqdm(total=total, unit=" prompts", file=sys.stderr, disable=None if show else True) as bar:

            async def answer(number: int, line: bytes) -> Result:
                if not args.text and is_request(line):
                    if defaults or args.token_ids or images:
                        raise UsageError(_ONLY_PROMPTS)
                    return await answer_request(post(), line)
                return await answer_line(
                    model, defaults, number, line, plain=args.text, ids=args.token_ids, images=images
                )

            async def write(result: Result) -> None:
                nonlocal failed, tokens
                failed += result.failed
                tokens += result.tokens
                await anyio.to_thread.run_sync(_write, out, msgspec.json.encode(result.body) + b"\n")
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()

            try:
                await run_batch(read_lines(source.fileno()), answer, write, concurrency)
            except LineTooLongError:
                raise CommandError(f"a line of the input has more than {format_bytes(MAX_LINE_BYTES)}") from None
    return failed


class _Job:
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.result = Result({})


async def run_batch(
    lines: AsyncIterator[bytes],
    answer: Callable[[int, bytes], Awaitable[Result]],
    write: Callable[[Result], Awaitable[None]],
    concurrency: int,
) -> None:
    """Write `answer(number, line)` for every line that is not blank, in order. Numbers start at 1.

    An exception of `answer`, `write` or `lines` ends the run. It is raised alone, not in a group.
    """
    room = anyio.Semaphore(concurrency)
    put, take = anyio.create_memory_object_stream[_Job](_WINDOW * concurrency)

    async def work(job: _Job, number: int, line: bytes) -> None:
        try:
            job.result = await answer(number, line)
        finally:
            room.release()
        job.done.set()

    async def read() -> None:
        with put:
            number = 0
            async for line in lines:
                number += 1
                if line.strip():
                    job = _Job()
                    await put.send(job)  # waits while many results have not been written
                    await room.acquire()
                    tasks.start_soon(work, job, number, line)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            with take:
                async for job in take:
                    await job.done.wait()
                    await write(job.result)
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class LineTooLongError(Exception):
    """A line has more bytes than `MAX_LINE_BYTES`."""


async def read_lines(file: int) -> AsyncIterator[bytes]:
    """Yield the lines of a file descriptor without their line breaks. Uses no thread. Raises `LineTooLongError`."""
    pieces: list[bytes] = []  # of the line that has not ended
    held = 0  # bytes
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
    except PermissionError:  # a file on a disk, which is always readable
        await asyncio.sleep(0)
        return os.read(file, _READ_BYTES)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)
    return os.read(file, _READ_BYTES)


def _write(out: BinaryIO, line: bytes) -> None:
    out.write(line)
    out.flush()


def _count_lines(path: str) -> int | None:
    """Return the number of lines of a file, for the bar; None for a pipe."""
    if path == "-" or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_COUNT_BYTES), b""))
