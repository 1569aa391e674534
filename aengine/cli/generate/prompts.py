"""Runs a file of prompts through a model, with a progress bar."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, BinaryIO

import anyio.to_thread
import msgspec
from tqdm import tqdm

from aengine.cli.errors import CommandError, UsageError
from aengine.cli.generate.batch import Result, answer_line, run_batch
from aengine.cli.generate.lines import MAX_LINE_BYTES, LineTooLongError, read_lines
from aengine.cli.generate.requests import answer_request, is_request, post_to
from aengine.cli.knobs import read_knobs
from aengine.cli.model import opened_model
from aengine.config import EngineConfig
from aengine.sizes import format_bytes

_SERVER_CONCURRENCY = 64
_COUNT_BYTES = 2**20
_ONLY_PROMPTS = (
    "flags for sampling, --adapter and --token-ids are for prompts: a line with custom_id says everything in its body"
)


def generate(args: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Answer every line; the exit status: 1 if any line could not be answered."""
    with (
        _opened(args.input, "rb", sys.stdin.fileno()) as source,
        _opened(args.output, "wb", sys.stdout.fileno()) as out,
    ):
        failed = asyncio.run(_generate(args, sampling, source, out))
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


async def _generate(args: argparse.Namespace, sampling: dict[str, Any], source: BinaryIO, out: BinaryIO) -> int:
    failed = 0
    tokens = 0
    config = read_knobs(args, EngineConfig)
    show = config.progress
    concurrency = args.concurrency or (config.max_num_seqs if args.url is None else _SERVER_CONCURRENCY)
    defaults = sampling if args.adapter is None else sampling | {"adapter": args.adapter}
    async with opened_model(args) as model:
        post = cache(partial(post_to, model))  # made for the first line that needs it
        total = await anyio.to_thread.run_sync(_count_lines, args.input) if show else None
        # disable=None: none where standard error is no terminal
        with tqdm(total=total, unit=" prompts", file=sys.stderr, disable=None if show else True) as bar:

            async def answer(number: int, line: bytes) -> Result:
                if not args.text and is_request(line):
                    if defaults or args.token_ids:
                        raise UsageError(_ONLY_PROMPTS)
                    return await answer_request(post(), line)
                return await answer_line(model, defaults, number, line, plain=args.text, ids=args.token_ids)

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


def _write(out: BinaryIO, line: bytes) -> None:
    out.write(line)
    out.flush()


def _count_lines(path: str) -> int | None:
    """The lines of a file, for the bar; None where they cannot be counted beforehand."""
    if path == "-" or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_COUNT_BYTES), b""))
