"""The shell shows the same answers whether the model is in this process or on a server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from aengine import Client, Engine
from aengine.cli.chat.shell import Shell
from aengine.cli.model import Model
from tests.http.demo_server import hosted_demo

pytestmark = pytest.mark.anyio


async def shown(model: Model, sampling: dict[str, Any], *before: str) -> str:
    """Return the shell's output for one question, without the figures."""
    lines: Iterator[str] = iter([*before, "What is 17 + 25?"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    await Shell(model, out, {"temperature": 0, **sampling}, dim=False).run(read)
    answer, _, _ = out.getvalue().rpartition("[")
    return answer


@pytest.mark.slow
async def test_both_say_the_same() -> None:
    async with (
        hosted_demo() as url,
        Client(url) as client,
        Engine(device="cpu", max_num_seqs=8, kv_cache_gib=0.1, progress=False) as engine,
    ):
        for sampling, before, expected in (
            ({}, (), "42"),
            ({}, ("/set thinking true",), "\n\n17 + 25 = 42."),
            ({"max_tokens": 3}, (), ""),
            ({"structured": {"regex": "(yes|no)"}}, (), ""),
        ):
            answer = await shown(engine, sampling, *before)
            assert answer == await shown(client, sampling, *before)
            assert answer.strip()
            assert expected in answer
            assert "<think>" not in answer
        for model in (engine, client):
            assert await shown(model, {"temperature": 9}) == ""
