"""max_tokens beyond the context is reduced at OpenAI's and Anthropic's endpoints; the answer ends by length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from aengine import SamplingParams
from tests.http.demo_server import DemoEngine, demo_server

CONTEXT = 64
PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": PROMPT}]
MOST = 32_000  # tokens, as agents ask for them
ON: dict[str, Any] = {"temperature": 0, "ignore_eos": True}  # only the length ends the answer

PATHS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/completions", "max_tokens", {"prompt": PROMPT, **ON}),
    ("/v1/completions", "max_tokens", {"prompt": [5, 6, 7], "logprobs": 2, **ON}),
    ("/v1/chat/completions", "max_tokens", {"messages": CHAT, **ON}),
    ("/v1/chat/completions", "max_completion_tokens", {"messages": CHAT, "logprobs": True, **ON}),
    ("/v1/responses", "max_output_tokens", {"input": PROMPT, **ON}),
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with (
        demo_server({"max_model_len": CONTEXT}) as url,
        httpx2.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize(("path", "name", "body"), PATHS)
def test_an_answer_may_fill_the_rest_of_the_context(
    client: httpx2.Client, path: str, name: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json={**body, name: MOST})
    assert answer.status_code == 200, answer.text
    reported = answer.json()
    assert reported["usage"]["total_tokens"] == CONTEXT
    if "choices" in reported:
        assert reported["choices"][0]["finish_reason"] == "length"
    else:
        assert reported["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(("path", "name", "body"), PATHS)
def test_a_prompt_that_leaves_nothing_is_refused(
    client: httpx2.Client, path: str, name: str, body: dict[str, Any]
) -> None:
    long = "a b c " * CONTEXT
    longer: dict[str, Any] = {"prompt": long, "input": long, "messages": [{"role": "user", "content": long}]}
    refused = client.post(path, json={**body, **{key: longer[key] for key in body if key in longer}, name: MOST})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.anyio
async def test_a_text_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with DemoEngine(max_model_len=CONTEXT) as engine:
        texts, encode = [], engine.tokenizer.encode

        async def counted(text: str, *args: Any, **options: Any) -> list[int]:
            texts.append(text)
            return await encode(text, *args, **options)

        monkeypatch.setattr(engine.tokenizer, "encode", counted)
        stream = await engine.submit(PROMPT, SamplingParams(max_tokens=MOST), clip=True)
        stream.abort()
    assert texts == [PROMPT]
