"""`POST /generate`."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import msgspec
import pytest

from aengine import Client
from aengine.http.native.generate import Generated, GeneratedChoice, GenerateRequest
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.types import ToolCall, join_calls
from tests.http.fake_engine import CACHED_TOKENS, WORDS, FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 6,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
}
PROMPT = "The capital of France is"


@pytest.mark.parametrize("path", ["/generate", "/v1/generate"])
async def test_streams_by_default(path: str) -> None:
    async with serving() as server:
        response = await server.post(path, prompt=PROMPT)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        *events, last, done = await server.events(path, prompt=PROMPT)
    assert done == "[DONE]"
    assert events == [
        {"text": word, "token_ids": [100 + i], "finish_reason": None} for i, word in enumerate(WORDS[:-1])
    ]
    assert last == {"text": WORDS[-1], "token_ids": [105], "finish_reason": "stop", "usage": USAGE}


async def test_answers_at_once_when_asked() -> None:
    async with serving() as server:
        response = await server.post("/generate", prompt=PROMPT, stream=False)
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer.pop("id").startswith("gen-")
    assert answer == {
        "text": "".join(WORDS),
        "token_ids": [100, 101, 102, 103, 104, 105],
        "finish_reason": "stop",
        "usage": USAGE,
    }


async def test_takes_token_ids() -> None:
    async with serving() as server:
        await server.post("/generate", input_ids=[1, 2, 3])
        await server.post("/generate", prompt=[4, 5])
        assert [request.prompt for request in server.engine.submitted] == [[1, 2, 3], [4, 5]]


async def test_several_choices() -> None:
    async with serving() as server:
        *events, _ = await server.events("/generate", prompt=PROMPT, n=2, max_tokens=2)
        whole = (await server.post("/generate", prompt=PROMPT, n=2, max_tokens=2, stream=False)).json()
    assert [event["index"] for event in events] == [0, 1, 0, 1]
    assert [event["finish_reason"] for event in events] == [None, None, "length", "length"]
    assert ["usage" in event for event in events] == [False, False, False, True]
    assert [choice["text"] for choice in whole["choices"]] == [WORDS[0] + WORDS[1]] * 2
    assert whole["usage"]["completion_tokens"] == 4


async def test_logprobs() -> None:
    async with serving() as server:
        first, *_ = await server.events("/generate", prompt=PROMPT, logprobs=1)
        plain, *_ = await server.events("/generate", prompt=PROMPT)
        whole = (await server.post("/generate", prompt=PROMPT, logprobs=1, stream=False)).json()
    expected = {
        "token_id": 100,
        "token": "Paris",
        "logprob": -0.25,
        "top": [{"token_id": 500, "token": "other0", "logprob": -2.0}],
    }
    assert first["logprobs"] == [expected]
    assert "logprobs" not in plain
    assert whole["logprobs"][0] == expected
    assert len(whole["logprobs"]) == len(WORDS)


def test_every_sampling_parameter_is_accepted_by_its_name() -> None:
    fields = {*GenerateRequest.__struct_fields__, "structured"}  # which has other names
    assert set(SamplingParams.__struct_fields__) <= fields


async def test_hands_parameters_to_the_engine() -> None:
    given = {
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0.25,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"7": 2.5},
        "seed": 11,
        "stop": ["x", "y"],
        "stop_in_thought": True,
        "unstopped": ["a", "b"],
        "stop_token_ids": [3],
        "bad_words": ["bad"],
        "allowed_token_ids": [1, 2],
        "include_stop": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "shown_special_ids": [5],
        "logprobs": 2,
        "prompt_logprobs": 3,
        "n": 2,
        "speculation": False,
    }
    async with serving() as server:
        response = await server.post("/generate", prompt=PROMPT, priority=-1, cache_salt="me", **given)
        assert response.status_code == 200, response.text
        request = server.engine.submitted[0]
    assert msgspec.json.decode(msgspec.json.encode(request.params)) == {**given, "structured": None}
    assert request.options["priority"] == -1
    assert request.options["cache_salt"] == "me"


async def test_missing_parameters_are_the_checkpoints_defaults() -> None:
    async with serving() as server:
        await server.post("/generate", prompt=PROMPT, max_tokens=3, temperature=None, stop="end", stream=None)
        await server.post("/generate", prompt=[1])
        first, second = server.engine.submitted
    assert first.params == SamplingParams(temperature=0.5, max_tokens=3, stop=("end",))
    assert second.params.max_tokens == 63  # the default of 128 does not fit the context of 64


async def test_128_tokens_by_default() -> None:
    async with serving() as server:
        server.engine.max_model_len = 1000
        await server.post("/generate", prompt=PROMPT)
        assert server.engine.submitted[0].params.max_tokens == 128


async def test_or_until_the_context_is_full() -> None:
    async with serving() as server:
        server.engine.max_model_len = 1000
        await server.post("/generate", prompt=PROMPT, fill_context=True)
        await server.post("/generate", prompt=PROMPT, fill_context=True, max_tokens=7)
        first, second = server.engine.submitted
    assert first.params.max_tokens is None
    assert second.params.max_tokens == 7


async def test_a_chat_is_a_prompt_too() -> None:
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    tool = {"type": "function", "function": {"name": "add"}}
    async with serving() as server:
        await server.post("/generate", messages=messages, tools=[tool], chat_template_kwargs={"enable_thinking": True})
        (chat,) = server.engine.chats
        assert server.engine.submitted[0].prompt == [1] * 5
    assert (chat.messages, chat.tools, chat.template_kwargs) == (messages, [tool], {"enable_thinking": True})


def test_max_tokens_beyond_the_context_is_refused_with_all_numbers(demo: httpx2.Client) -> None:
    tokenized = demo.post("/tokenize", json={"prompt": PROMPT}).json()
    context = tokenized["max_model_len"]
    response = demo.post("/generate", json={"prompt": PROMPT, "max_tokens": context - 1})
    assert response.status_code == 400
    error = response.json()["error"]
    numbers = [int(number) for number in re.findall(r"\d+", error["message"])]
    assert {context, context - 1, tokenized["count"]} <= set(numbers), error["message"]
    assert error["param"] == "max_tokens"
    assert error["code"] == "context_length_exceeded"


async def test_the_model_may_be_named() -> None:
    async with serving(served_model_name="mine") as server:
        assert (await server.post("/generate", prompt="a", model="mine")).status_code == 200
        response = await server.post("/generate", prompt="a", model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "input_ids": [1]}, {"prompt": "a", "messages": [{"role": "user"}]}]
)
async def test_needs_exactly_one_prompt(body: dict[str, object]) -> None:
    async with serving() as server:
        response = await server.post("/generate", **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("prompt", [{"prompt": "a"}, {"input_ids": [1]}])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("reasoning_effort", "high"),
        ("add_generation_prompt", True),
        ("continue_final_message", True),
    ],
)
async def test_template_fields_need_messages(prompt: dict[str, object], field: str, value: object) -> None:
    async with serving() as server:
        answer = await server.post("/generate", **prompt, **{field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert server.engine.submitted == []
        nothing = {"tools": [], "chat_template_kwargs": {}, "add_generation_prompt": False, "reasoning_effort": None}
        assert (await server.post("/generate", **prompt, **nothing)).status_code == 200


CALL = [
    "<think>",
    "A ",
    "<tool_call>",
    "</think>",
    "\n\nI ",
    "look.\n<tool",
    '_call>{"name": "f", "arguments": {"a"',
    ": 1}}",
]


async def test_of_a_chat_thoughts_and_calls_come_apart_from_the_text() -> None:
    engine = FakeEngine()
    engine.words, engine.answer_format = CALL, AnswerFormat(calls="hermes", thoughts=True)
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    async with serving(engine) as server:
        whole = (await server.post("/generate", stream=False, **chat)).json()
        *events, _ = await server.events("/generate", **chat)
        two = (await server.post("/generate", stream=False, n=2, **chat)).json()
        raw = (await server.post("/generate", prompt=PROMPT, stream=False)).json()
        async with Client(server.url) as client:
            reported = await client.chat(**chat)
            fragments = [fragment async for fragment in client.chat_stream(**chat, n=2)]
    assert (whole["text"], whole["reasoning"], whole["finish_reason"]) == ("I look.", "A <tool_call>", "stop")
    (call,) = whole["tool_calls"]
    assert {"reasoning", "tool_calls"} <= whole.keys() <= {*Generated.__struct_fields__}  # as /openapi.json says
    assert {"reasoning", "tool_calls"} <= two["choices"][1].keys() <= {*GeneratedChoice.__struct_fields__}
    assert call.keys() == {*ToolCall.__struct_fields__}
    assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert (reported.text, reported.reasoning) == (whole["text"], whole["reasoning"])
    assert [(call.name, call.arguments) for call in reported.tool_calls] == [("f", '{"a": 1}')]
    assert "".join(event["text"] for event in events) == whole["text"]
    assert "".join(event.get("reasoning", "") for event in events) == whole["reasoning"]
    assert sum(len(event["token_ids"]) for event in events) == len(CALL)
    for index in range(2):
        calls = join_calls(call for each in fragments if each.index == index for call in each.tool_calls)
        assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]
    assert raw["text"] == "".join(CALL)
    assert "reasoning" not in raw
