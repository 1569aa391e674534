"""Details of chats that clients read: the number of thought tokens, and the bytes of tokens."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
THINKING = {"messages": QUESTION, "temperature": 0, "reasoning_effort": "high", "max_tokens": 200}


def answer(demo: httpx2.Client, **body: Any) -> Any:
    response = demo.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed_usage(demo: httpx2.Client, **body: Any) -> Any:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    events = [line.removeprefix("data: ") for line in demo.post(PATH, json=body | more).text.split("\n\n") if line]
    return httpx2.Response(200, text=events[-2]).json()["usage"]


def tokens_of(demo: httpx2.Client, text: str) -> int:
    return int(demo.post("/tokenize", json={"prompt": text}).json()["count"])


def test_the_tokens_of_a_thought_are_counted(demo: httpx2.Client) -> None:
    whole = answer(demo, **THINKING)
    thought = whole["choices"][0]["message"]["reasoning_content"]
    count = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert count == tokens_of(demo, f"\n{thought}\n") > 5
    assert count < whole["usage"]["completion_tokens"]
    assert streamed_usage(demo, **THINKING)["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.slow
def test_thought_tokens_of_all_choices_and_of_unfinished_thoughts(demo: httpx2.Client) -> None:
    one = answer(demo, **THINKING)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert answer(demo, **THINKING, n=3)["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * one
    cut = {**THINKING, "max_tokens": 5}
    usage = answer(demo, **cut)["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]) == (5, 4)  # <think>
    assert streamed_usage(demo, **cut)["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_without_a_thought_there_are_no_thought_tokens(demo: httpx2.Client) -> None:
    plain = {"messages": QUESTION, "temperature": 0, "reasoning_effort": "none"}
    assert answer(demo, **plain)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert streamed_usage(demo, **plain)["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in demo.post("/v1/completions", json={"prompt": "a"}).json()["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_tokens_put_together_are_the_text(demo: httpx2.Client, stream: bool) -> None:
    text = "🎉é👋漢"
    body = {
        "messages": QUESTION,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 3,
        "structured_outputs": {"choice": [text]},
        "stream": stream,
    }
    response = demo.post(PATH, json=body)
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
        choices = [httpx2.Response(200, text=event).json()["choices"][0] for event in events]
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    *entries, end = entries
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert any(entry["token"] == "\ufffd" and len(entry["bytes"]) == 1 for entry in entries)  # split
    assert bytes(end["bytes"]) == b"<|im_end|>"
    assert all(isinstance(top["bytes"], list) for entry in entries for top in entry["top_logprobs"])


def test_openais_client_finds_them(demo_url: str) -> None:
    with openai.OpenAI(base_url=demo_url, api_key="none", timeout=30) as client:
        messages: Any = QUESTION
        done = client.chat.completions.create(
            model="aengine-demo", messages=messages, temperature=0, reasoning_effort="high", logprobs=True
        )
        assert done.usage is not None
        assert done.usage.completion_tokens_details is not None
        assert done.usage.completion_tokens_details.reasoning_tokens
        message: Any = done.choices[0].message
        assert message.reasoning == message.reasoning_content
        assert done.choices[0].logprobs is not None
        assert done.choices[0].logprobs.content is not None
        assert all(entry.bytes for entry in done.choices[0].logprobs.content)
        again: Any = [*QUESTION, message.model_dump(), *QUESTION]  # the history of many clients
        assert client.chat.completions.create(model="aengine-demo", messages=again, max_tokens=3).choices
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="aengine-demo", messages=[{"role": "user", "content": "a " * 9000}])
        assert error.value.code == "context_length_exceeded"
        assert str(error.value.body["message"]).startswith("This model's maximum context length is 2048 tokens")  # type: ignore[index]
