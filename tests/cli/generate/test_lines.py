"""Lines from whatever holds them."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from aengine.cli.generate import lines
from aengine.cli.generate.lines import LineTooLongError, read_lines

pytestmark = pytest.mark.anyio


async def lines_of(path: Path, content: bytes) -> list[bytes]:
    path.write_bytes(content)  # noqa: ASYNC240 - small, and nobody else waits
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
    assert waited.cancelled_caught  # nobody holds up the loop, and the wait can be given up
    os.close(writing)
    os.close(reading)


async def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    with pytest.raises(LineTooLongError):
        await lines_of(tmp_path / "file", b"x" * 101)
