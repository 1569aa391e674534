"""OpenAI's client."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.http.fake_engine import WORDS
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

TEXT = "".join(WORDS)


def sync_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


async def test_sync() -> None:
    def use(client: openai.OpenAI) -> None:
        with client:
            assert [model.id for model in client.models.list()] == ["fake"]
            assert client.models.retrieve("fake").owned_by == "aengine"
            chat = client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], n=2, logprobs=True, top_logprobs=2
            )
            assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
            assert chat.usage is not None
            assert chat.usage.prompt_tokens_details is not None
            assert chat.usage.prompt_tokens_details.cached_tokens == 2
            assert chat.choices[0].logprobs is not None
            assert chat.choices[0].logprobs.content is not None
            assert chat.choices[0].logprobs.content[0].top_logprobs[1].token == "other1"
            stream = client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(stream)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
            assert chunks[-1].usage is not None

    async with serving() as server:
        await asyncio.to_thread(use, sync_client(server))


async def test_async() -> None:
    async with serving() as server, async_client(server) as client:
        completion = await client.completions.create(model="fake", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        text = ""
        async for chunk in await client.completions.create(model="fake", prompt="a", stream=True):
            text += chunk.choices[0].text
        assert text == TEXT
        async with client.chat.completions.stream(model="fake", messages=[{"role": "user", "content": "hi"}]) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.content == TEXT


async def test_errors_have_the_clients_own_types() -> None:
    async with serving() as server, async_client(server) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="a")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="fake", prompt="a", temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="fake", messages=[])


async def test_leaving_a_stream_early() -> None:
    async with serving() as server, async_client(server) as client:
        server.engine.held = True
        stream = await client.completions.create(model="fake", prompt="a", stream=True)
        held = await server.engine.next_stream()
        await stream.close()
        async with asyncio.timeout(60):
            await held.aborted.wait()
