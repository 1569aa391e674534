"""Many lines: results in order, a bounded number at once, bounded memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aengine.cli.generate import run
from aengine.cli.generate.prompts import Result
from aengine.cli.generate.run import LineTooLongError, read_lines, run_batch

pytestmark = pytest.mark.anyio


async def numbered(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield str(number).encode()


async def test_results_come_in_order_however_long_each_takes() -> None:
    written: list[Any] = []

    async def answer(number: int, line: bytes) -> Result:
        for _ in range(number * 7 % 11):
            await asyncio.sleep(0)
        return Result({"line": number, "text": line.decode()})

    async def write(result: Result) -> None:
        written.append(result.body)

    await run_batch(numbered(100), answer, write, concurrency=8)
    assert written == [{"line": number, "text": str(number - 1)} for number in range(1, 101)]


async def test_one_slow_prompt_holds_up_the_reading_and_nothing_piles_up() -> None:
    read = running = most = 0
    slow = anyio.Event()

    async def lines() -> AsyncIterator[bytes]:
        nonlocal read
        async for line in numbered(2_000):
            read += 1
            yield line

    async def answer(number: int, line: bytes) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await (slow.wait() if number == 1 else asyncio.sleep(0))
        running -= 1
        return Result({})

    async def write(result: Result) -> None:
        pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_batch, lines(), answer, write, 4)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert read < 30
        slow.set()
    assert read == 2_000
    assert most == 4


async def test_blank_lines_count_and_give_nothing() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for line in (b"a", b"", b"  ", b"b"):
            yield line

    written: list[Any] = []

    async def answer(number: int, line: bytes) -> Result:
        return Result({"line": number})

    async def write(result: Result) -> None:
        written.append(result.body["line"])

    await run_batch(lines(), answer, write, 2)
    assert written == [1, 4]


@pytest.mark.parametrize("where", ["answer", "write", "lines"])
async def test_an_exception_ends_the_run_and_is_not_grouped(where: str) -> None:
    answered = 0

    async def lines() -> AsyncIterator[bytes]:
        async for line in numbered(10_000):
            yield line
        if where == "lines":
            raise BrokenPipeError

    async def answer(number: int, line: bytes) -> Result:
        nonlocal answered
        answered += 1
        await asyncio.sleep(0)
        if where == "answer" and number == 5:
            raise BrokenPipeError
        return Result({})

    async def write(result: Result) -> None:
        if where == "write":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await run_batch(lines(), answer, write, 3)
    assert answered < 10_000 or where == "lines"


async def lines_of(path: Path, content: bytes) -> list[bytes]:
    path.write_bytes(content)  # noqa: ASYNC240 - a small file
    with path.open("rb") as file:
        return [line async for line in read_lines(file.fileno())]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\r\n\nb", [b"a", b"", b"b"]),
        (b"x" * 200_000 + b"\ny\n", [b"x" * 200_000, b"y"]),
    ],
)
async def test_a_file(tmp_path: Path, content: bytes, expected: list[bytes]) -> None:
    assert await lines_of(tmp_path / "file", content) == expected


async def test_a_pipe_gives_each_line_when_it_comes() -> None:
    reading, writing = os.pipe()
    found = read_lines(reading)
    os.write(writing, b"one\ntw")
    assert await anext(found) == b"one"
    with anyio.move_on_after(0.05) as waited:
        await anext(found)
    assert waited.cancelled_caught  # the loop is not blocked, and the wait can be cancelled
    os.close(writing)
    os.close(reading)


async def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_LINE_BYTES", 100)
    with pytest.raises(LineTooLongError):
        await lines_of(tmp_path / "file", b"x" * 101)
