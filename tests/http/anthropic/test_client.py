"""Anthropic's client, with an engine that recites."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from aengine.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    QueueFullError,
)
from aengine.types import Fragment, Usage
from tests.http.fake_engine import WORDS, FakeEngine
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)
HELLO: Any = [{"role": "user", "content": "hello there"}]
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 20, "messages": HELLO}
KEY = "a-key"


def async_client(server: Server, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        **{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": 30} | options
    )


async def test_the_client_without_async() -> None:
    def use(client: anthropic.Anthropic) -> None:
        with client:
            message = client.messages.create(**ASKED)
            assert [block.text for block in message.content if block.type == "text"] == [TEXT]
            assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
            assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
            assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (0, 2)
            assert message.usage.output_tokens == len(WORDS)
            assert message._request_id
            with client.messages.stream(**ASKED) as stream:
                assert list(stream.text_stream) == list(WORDS)
                assert stream.get_final_message().usage == message.usage
            assert [event.type for event in client.messages.create(**ASKED, stream=True)] == [
                "message_start",
                "content_block_start",
                *["content_block_delta"] * len(WORDS),
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
            assert client.messages.count_tokens(model="fake", messages=HELLO).input_tokens == 2

    async with serving() as server:
        await asyncio.to_thread(use, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0))


async def test_with_async() -> None:
    async with serving() as server, async_client(server) as client:
        message = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
        assert final.to_dict()["usage"] == message.to_dict()["usage"]
        assert [block.text for block in final.content if block.type == "text"] == [TEXT]
        assert (await client.messages.count_tokens(model="fake", messages=HELLO)).input_tokens == 2


async def test_betas_and_metadata_are_taken_whatever_they_are() -> None:
    async with serving() as server, async_client(server) as client:
        message = await client.beta.messages.create(  # sends /v1/messages?beta=true
            **ASKED,
            betas=["interleaved-thinking-2025-05-14", "of-tomorrow-2031-01-01"],
            metadata={"user_id": "u", "of_tomorrow": [1]},  # type: ignore[typeddict-unknown-key]
            service_tier="auto",
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_headers={"anthropic-version": "2031-01-01"},
        )
        assert message.content[0].type == "text"
        await client.messages.create(**ASKED, extra_body={"metadata": None, "betas": "x", "speed": "fast"})
        response = await server.client.post("/v1/messages?beta=true", json=ASKED)  # without Anthropic's headers
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("error", "kind", "status", "type_"),
    [
        (QueueFullError("full"), anthropic.OverloadedError, 529, "overloaded_error"),
        (EngineNotReadyError("wait"), anthropic.ServiceUnavailableError, 503, "overloaded_error"),
        (EngineClosedError("closed"), anthropic.ServiceUnavailableError, 503, "overloaded_error"),
        (EngineFailedError("failed"), anthropic.InternalServerError, 500, "api_error"),
        (KeyError("bug"), anthropic.InternalServerError, 500, "api_error"),
        (ContextLengthError("9 > 8", "prompt"), anthropic.BadRequestError, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_clients_own_types(
    error: Exception, kind: type[anthropic.APIStatusError], status: int, type_: str
) -> None:
    async with serving(FakeEngine(refuse=error)) as server, async_client(server) as client:
        with pytest.raises(kind) as raised:
            await client.messages.create(**ASKED)
    assert (raised.value.status_code, raised.value.type) == (status, type_)
    assert raised.value.request_id
    assert raised.value.body["request_id"] == raised.value.request_id  # type: ignore[index]
    if isinstance(error, ContextLengthError):  # Claude Code shortens a conversation at these words
        assert str(raised.value.api_message).startswith("prompt is too long: ")


async def test_errors_of_requests() -> None:
    async with serving(api_keys=(KEY,)) as server:
        for options in (
            {"api_key": KEY},
            {"auth_token": KEY, "api_key": None},
            {"default_headers": {"x-api-key": KEY}},
        ):
            async with async_client(server, **options) as client:
                await client.messages.create(**ASKED)
                with pytest.raises(anthropic.NotFoundError) as unknown:
                    await client.messages.create(**ASKED | {"model": "claude-of-tomorrow"})
                assert unknown.value.type == "not_found_error"
                with pytest.raises(anthropic.NotFoundError):
                    await client.messages.batches.list()
                with pytest.raises(anthropic.BadRequestError, match="temperature"):
                    await client.messages.create(**ASKED, extra_body={"temperature": 9})
        async with async_client(server) as client:
            with pytest.raises(anthropic.AuthenticationError) as stranger:
                await client.messages.create(**ASKED)
        assert stranger.value.type == "authentication_error"


@pytest.mark.slow
async def test_the_client_retries_at_an_overloaded_server() -> None:
    engine = FakeEngine(refuse=QueueFullError("full"))
    refused = 0

    async def note(request: Any, call_next: Any) -> Any:
        nonlocal refused
        response = await call_next(request)
        if response.status_code == 529:
            assert response.headers["retry-after"] == "1"
            refused += 1
            engine.refuse = None
        return response

    async with serving(engine) as server, async_client(server, max_retries=1, middleware=[note]) as client:
        assert (await client.messages.create(**ASKED)).stop_reason == "end_turn"
    assert refused == 1


async def failing(end: Callable[[Any], None]) -> anthropic.APIStatusError:
    """Return the error of a stream that the engine ends with an error."""
    engine = FakeEngine(held=True)
    async with serving(engine) as server, async_client(server) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        held = await engine.next_stream()
        held.put(Fragment("a", (1,)))
        try:
            async for event in stream:
                if event.type == "content_block_delta":
                    end(held)
        except anthropic.APIStatusError as error:
            return error
    raise AssertionError("it ended well")


async def test_a_stream_that_fails_on_its_way() -> None:
    error = await failing(lambda held: held.fail(EngineFailedError("the step failed at /opt/step.py")))
    assert (error.type, error.api_message) == ("api_error", "the step failed at step.py")
    assert error.body["request_id"] == error.request_id  # type: ignore[index]


async def test_a_stream_that_is_aborted_from_outside() -> None:
    error = await failing(lambda held: held.put(Fragment("", (), None, "abort", Usage(1, 1, 0))))
    assert (error.type, error.api_message) == ("api_error", "the request was aborted")


async def test_leaving_a_stream_early() -> None:
    async with serving(FakeEngine(held=True)) as server, async_client(server) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        held = await server.engine.next_stream()
        await stream.close()
        async with asyncio.timeout(60):
            await held.aborted.wait()
