"""An engine in this process and a server say the same to the shell."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from aengine import Client, Engine
from aengine.cli.chat.backends import AnswerEnd, ChatBackend, EngineBackend, ServerBackend
from aengine.errors import InvalidRequestError
from aengine.text.answer.deltas import ContentDelta, ReasoningDelta
from tests.http.demo_server import hosted_demo

pytestmark = pytest.mark.anyio

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


async def answer_of(
    backend: ChatBackend, sampling: dict[str, Any], template_kwargs: dict[str, Any]
) -> tuple[str, str, Any]:
    """The thought, the content and the ending."""
    thought = content = ""
    ending = None
    async with aclosing(backend.answer(QUESTION, {"temperature": 0, **sampling}, template_kwargs)) as pieces:
        async for piece in pieces:
            match piece:
                case ReasoningDelta(text=text):
                    thought += text
                case ContentDelta(text=text):
                    content += text
                case AnswerEnd():
                    assert ending is None
                    ending = (piece.usage.prompt_tokens, piece.usage.completion_tokens, piece.finish_reason)
    return thought, content, ending


@pytest.mark.slow
async def test_both_say_the_same() -> None:
    async with (
        hosted_demo() as url,
        Client(url) as client,
        Engine(device="cpu", max_num_seqs=8, kv_cache_gib=0.1, progress=False) as engine,
    ):
        here, there = EngineBackend(engine), ServerBackend(client)
        for sampling, template_kwargs, thinks, expected in (
            ({}, {}, False, "42"),
            ({}, {"enable_thinking": True}, True, "42"),
            ({"max_tokens": 3}, {}, False, ""),
            ({"structured": {"regex": "(yes|no)"}}, {}, False, ""),
        ):
            thought, content, ending = await answer_of(here, sampling, template_kwargs)
            assert (thought, content, ending) == await answer_of(there, sampling, template_kwargs)
            assert bool(thought) is thinks
            assert expected in content
            assert "<think>" not in content
        for backend in (here, there):
            with pytest.raises(InvalidRequestError, match="temperature"):
                await answer_of(backend, {"temperature": 9}, {})
