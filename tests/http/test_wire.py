"""Every answer as sent over the wire. These tests change whenever clients see a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

import aengine
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.types import Fragment, PromptLogprob, TokenLogprob, TopLogprob, Usage
from tests.http.fake_engine import CACHED_TOKENS, CARD, FakeEngine, FakeStream
from tests.http.serving import Server, serving
from tests.http.wire import NOW, REQUEST_ID, Answer, ask

pytestmark = pytest.mark.anyio

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json", "x-request-id": REQUEST_ID}
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-request-id": REQUEST_ID,
}
NOT_KEPT = {**JSON, "cache-control": "no-store"}
HELLO = {"messages": [{"role": "user", "content": "hello there"}]}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALL_THE_TIME = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def post(server: Server, path: str, **body: Any) -> Any:
    """Return the body of a whole answer."""
    answer = await ask(server, "POST", path, body)
    assert answer[:2] == (200, JSON)
    return answer.body


async def streamed(server: Server, path: str, **body: Any) -> list[Any]:
    """Return the events before [DONE]."""
    answer = await ask(server, "POST", path, body)
    assert answer[:2] == (200, EVENTS)
    *events, done = answer.body
    assert done == "[DONE]"
    return events


def usage(prompt: int, completion: int, cached: int = CACHED_TOKENS) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_usage(prompt: int, completion: int) -> dict[str, Any]:
    return {**usage(prompt, completion), "completion_tokens_details": {"reasoning_tokens": 0}}


# ---- /generate --------------------------------------------------------------------------------------------


async def test_generate() -> None:
    async with serving() as server:
        assert await post(server, GENERATE, prompt="one two", max_tokens=2, stream=False) == {
            "id": "gen-ID",
            "text": "Paris, said",
            "token_ids": [100, 101],
            "finish_reason": "length",
            "usage": usage(2, 2),
        }
        assert await streamed(server, GENERATE, prompt="one two", max_tokens=2) == [
            {"text": "Paris", "token_ids": [100], "finish_reason": None},
            {"text": ", said", "token_ids": [101], "finish_reason": "length", "usage": usage(2, 2)},
        ]


async def test_generate_several_with_logprobs() -> None:
    body = {"prompt": "one two", "max_tokens": 1, "n": 2, "logprobs": 1}
    logprobs = [
        {
            "token_id": 100,
            "token": "Paris",
            "logprob": -0.25,
            "top": [{"token_id": 500, "token": "other0", "logprob": -2.0}],
        }
    ]
    said = {"text": "Paris", "token_ids": [100], "finish_reason": "length", "logprobs": logprobs}
    async with serving() as server:
        assert await post(server, GENERATE, stream=False, **body) == {
            "id": "gen-ID",
            **said,
            "choices": [{"index": 0, **said}, {"index": 1, **said}],
            "usage": usage(2, 2),
        }
        assert await streamed(server, GENERATE, **body) == [
            {"index": 0, **said},
            {"index": 1, **said, "usage": usage(2, 2)},
        ]


SCORED = Fragment(
    "x",
    (7,),
    finish_reason="stop",
    usage=Usage(2, 1, 0),
    prompt_logprobs=[
        PromptLogprob(3, -1.5, 2, [1, 5], [-0.5, -1.75]),
        PromptLogprob(2, -0.5, 1, [4, 2], [-0.5, -0.5]),  # one of two equally likely tokens
    ],
)
PROMPT_LOGPROBS = {
    "prompt_logprobs": [
        None,
        {
            "3": {"logprob": -1.5, "rank": 2, "decoded_token": "xxx"},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
            "5": {"logprob": -1.75, "rank": 2, "decoded_token": "xxxxx"},
        },
        {
            "2": {"logprob": -0.5, "rank": 1, "decoded_token": "xx"},
            "4": {"logprob": -0.5, "rank": 1, "decoded_token": "xxxx"},
        },
    ]
}


class Saying(FakeEngine):
    """Answers each prompt with these fragments, all at once."""

    def __init__(self, answer: Callable[[Any], Sequence[Fragment]]) -> None:
        super().__init__(held=True)
        self._answer = answer

    async def submit(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> FakeStream:
        stream = await super().submit(prompt, params, **options)
        stream.put(*self._answer(prompt))
        return stream


async def held(path: str, *fragments: Fragment, **body: Any) -> Any:
    """Return the server's answer from these fragments."""
    async with serving(Saying(lambda prompt: fragments)) as server:
        return await (streamed if body.get("stream") else post)(server, path, **body)


async def test_the_prompts_logprobs_at_every_endpoint() -> None:
    asked: dict[str, Any] = {"prompt_logprobs": 2, "stream": False}
    generated = await held(GENERATE, SCORED, prompt="a bbb", **asked)
    completed = await held(COMPLETIONS, SCORED, prompt="a bbb", **asked)
    chatted = await held(CHAT, SCORED, **HELLO, **asked)
    assert generated == {
        "id": "gen-ID",
        "text": "x",
        "token_ids": [7],
        "finish_reason": "stop",
        **PROMPT_LOGPROBS,
        "usage": usage(2, 1, 0),
    }
    (choice,) = completed["choices"]
    assert choice == {"index": 0, "text": "x", "logprobs": None, "finish_reason": "stop", **PROMPT_LOGPROBS}
    assert chatted["prompt_logprobs"] == PROMPT_LOGPROBS["prompt_logprobs"]
    assert await held(GENERATE, SCORED, prompt="a bbb", prompt_logprobs=2, stream=True) == [
        {"text": "x", "token_ids": [7], "finish_reason": "stop", **PROMPT_LOGPROBS, "usage": usage(2, 1, 0)}
    ]


# ---- /v1/completions --------------------------------------------------------------------------------------

COMPLETION = {"id": "cmpl-ID", "object": "text_completion", "created": NOW, "model": "fake"}


def completed(text: str, reason: str | None, logprobs: Any = None, index: int = 0) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def test_completions_of_several_prompts() -> None:
    """Choices are numbered over all prompts. Usage, cached tokens included, is the sum over all prompts."""

    def twice(prompt: str) -> list[Fragment]:
        first, second = (Fragment(f"{prompt} {index}", (1,), finish_reason="stop", index=index) for index in range(2))
        return [first, msgspec.structs.replace(second, usage=Usage(len(prompt), 2, len(prompt) - 1))]

    body = {"prompt": ["abc", "de"], "max_tokens": 2, "n": 2}
    choices = [completed(text, "stop", index=index) for index, text in enumerate(("abc 0", "abc 1", "de 0", "de 1"))]
    async with serving(Saying(twice)) as server:
        assert await post(server, COMPLETIONS, **body) == {**COMPLETION, "choices": choices, "usage": usage(5, 4, 3)}
        *chunks, last = await streamed(server, COMPLETIONS, **body, **ALL_THE_TIME)
    assert sorted((chunk["choices"][0] for chunk in chunks), key=lambda choice: choice["index"]) == choices
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count} for count in range(1, 5)
    ]  # FakeEngine counts words
    assert last == {**COMPLETION, "choices": [], "usage": usage(5, 4, 3)}


async def test_completions_streamed() -> None:
    body = {"prompt": "one", "max_tokens": 2}
    async with serving() as server:
        first = {**COMPLETION, "choices": [completed("Paris", None)]}
        second = {**COMPLETION, "choices": [completed(", said", "length")]}
        assert await streamed(server, COMPLETIONS, **body, stream=True) == [first, second]
        last = {**COMPLETION, "choices": [], "usage": usage(1, 2)}
        no: dict[str, Any] = {"usage": None}
        assert await streamed(server, COMPLETIONS, **body, **WITH_USAGE) == [first | no, second | no, last]
        so_far = [
            {"usage": {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}} for count in (1, 2)
        ]
        all_the_time = await streamed(server, COMPLETIONS, **body, **ALL_THE_TIME)
        assert all_the_time == [first | so_far[0], second | so_far[1], last]


async def test_completions_with_logprobs() -> None:
    """The offsets of a stream continue from chunk to chunk."""

    def logprobs(start: int, end: int) -> dict[str, Any]:
        return {
            "tokens": ["Paris", ", said"][start:end],
            "token_logprobs": [-0.25, -0.25][start:end],
            "top_logprobs": [{"other0": -2.0, "Paris": -0.25}, {"other0": -2.0, ", said": -0.25}][start:end],
            "text_offset": [0, 5][start:end],
        }

    body = {"prompt": "one", "max_tokens": 2, "logprobs": 1}
    async with serving() as server:
        assert await post(server, COMPLETIONS, **body) == {
            **COMPLETION,
            "choices": [completed("Paris, said", "length", logprobs(0, 2))],
            "usage": usage(1, 2),
        }
        assert await streamed(server, COMPLETIONS, **body, stream=True) == [
            {**COMPLETION, "choices": [completed("Paris", None, logprobs(0, 1))]},
            {**COMPLETION, "choices": [completed(", said", "length", logprobs(1, 2))]},
        ]


async def test_completions_that_echo() -> None:
    """The prompt's first token has no logprob. With max_tokens 0 the generated token is not shown."""
    same = TopLogprob(8, "y", -2.0), TopLogprob(9, "y", -3.0)  # two tokens of one text: the likelier counts
    drawn = TokenLogprob(1, "é", -0.25, same), TokenLogprob(1, "z", -0.5)
    scores = (SCORED.prompt_logprobs or [])[:1]
    said = Fragment("éz", (1, 1), drawn, "stop", Usage(2, 2, 0), prompt_logprobs=scores)
    echoed = {
        "tokens": ["x", "xxx", "é", "z"],
        "token_logprobs": [None, -1.5, -0.25, -0.5],
        "top_logprobs": [None, {"x": -0.5, "xxx": -1.5}, {"y": -2.0, "é": -0.25}, {"z": -0.5}],
        "text_offset": [0, 1, 5, 6],  # characters; the prompt has five
    }
    body = {"prompt": "a bbb", "echo": True, "logprobs": 1}
    whole = {
        **COMPLETION,
        "choices": [completed("a bbbéz", "stop", echoed)],
        "usage": usage(2, 2, 0),
    }
    assert await held(COMPLETIONS, said, **body) == whole
    mute = {name: values[:2] for name, values in echoed.items()}
    assert await held(COMPLETIONS, said, max_tokens=0, **body) == {
        **COMPLETION,
        "choices": [completed("a bbb", "length", mute)],
        "usage": usage(2, 0, 0),
    }


# ---- /v1/chat/completions ---------------------------------------------------------------------------------

WHOLE_CHAT = {"id": "chatcmpl-ID", "object": "chat.completion", "created": NOW, "model": "fake"}
CHUNK = {**WHOLE_CHAT, "object": "chat.completion.chunk"}


def delta(*, reason: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {**CHUNK, "choices": [{"index": 0, "delta": fields, "logprobs": logprobs, "finish_reason": reason}]}


async def test_chats() -> None:
    body = {**HELLO, "max_tokens": 2}
    async with serving() as server:
        message = {"role": "assistant", "content": "Paris, said"}
        assert await post(server, CHAT, **body) == {
            **WHOLE_CHAT,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
            "usage": chat_usage(2, 2),
        }
        chunks = [
            delta(role="assistant", content=""),
            delta(content="Paris"),
            delta(content=", said", reason="length"),
        ]
        assert await streamed(server, CHAT, **body, stream=True) == chunks
        no: dict[str, Any] = {"usage": None}
        last = {**CHUNK, "choices": [], "usage": chat_usage(2, 2)}
        assert await streamed(server, CHAT, **body, **WITH_USAGE) == [*(chunk | no for chunk in chunks), last]
        so_far = [
            {"usage": {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count}}
            for count in (0, 1, 2)
        ]
        all_the_time = [chunk | count for chunk, count in zip(chunks, so_far, strict=True)]
        assert await streamed(server, CHAT, **body, **ALL_THE_TIME) == [*all_the_time, last]


async def test_chats_with_logprobs_of_parts_of_characters() -> None:
    """A part of a character is shown as U+FFFD with its bytes. A U+FFFD of the model has its own bytes."""
    part = TokenLogprob(5, "\ufffd", -0.25, (TopLogprob(4, "\ufffd", -2.0), TopLogprob(6, "é", -3.0)))
    fragments = Fragment("", (5,), (part,)), Fragment("é", (6,), None, "stop", Usage(2, 2, 0))
    entry = {
        "token": "\ufffd",
        "logprob": -0.25,
        "bytes": list(b"xxxxx"),  # from FakeTokenizer
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -2.0, "bytes": list(b"xxxx")},
            {"token": "é", "logprob": -3.0, "bytes": [0xC3, 0xA9]},
        ],
    }
    asked = {**HELLO, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await held(CHAT, *fragments, **asked))["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "é"},
        "logprobs": {"content": [entry]},
        "finish_reason": "stop",
    }
    assert await held(CHAT, *fragments, **asked, stream=True) == [
        delta(role="assistant", content=""),
        delta(
            content="é", logprobs={"content": [entry]}, reason="stop"
        ),  # both were waiting, so they are sent together
    ]


THINKS_AND_CALLS = AnswerFormat(calls="hermes", thoughts=True)
SAID = ["<think>", "\nI call.", "\n</think>", "\n\nI ", "look.\n", "<tool_call>", '\n{"name": "f", ']
SAID += ['"arguments": {"a": 1}', "}\n</tool_call>", "\n<tool_call>", '{"name": "f", "arguments": {}}</tool_call>']
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


async def test_chats_with_a_thought_and_calls() -> None:
    engine = FakeEngine()
    engine.words, engine.answer_format = SAID, THINKS_AND_CALLS
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number, arguments in ((1, '{"a": 1}'), (2, "{}"))
    ]
    message = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "I call.",
        "reasoning": "I call.",
        "tool_calls": calls,
    }
    async with serving(engine) as server:
        assert await post(server, CHAT, **HELLO, **TOOLS) == {
            **WHOLE_CHAT,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}],
            "usage": chat_usage(2, len(SAID)),
        }
        events = await streamed(server, CHAT, **HELLO, **TOOLS, stream=True)

    def begun(index: int) -> dict[str, Any]:
        head = {"id": f"call_{index + 1}", "type": "function", "function": {"name": "f", "arguments": ""}}
        return delta(tool_calls=[{"index": index, **head}])

    def more(index: int, arguments: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, "function": {"arguments": arguments}}])

    assert events == [
        delta(role="assistant", content=None),
        delta(reasoning_content="I call.", reasoning="I call."),
        delta(content="I"),
        delta(content=" look."),
        begun(0),
        more(0, '{"a": 1}'),
        begun(1),
        more(1, "{}"),
        delta(reason="tool_calls"),
    ]


# ---- the others -------------------------------------------------------------------------------------------

LIST = {"data": [CARD], "object": "list", "has_more": False, "first_id": "fake", "last_id": "fake"}


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/tokenize", {"prompt": "a bb"}, (JSON, {"tokens": [1, 2], "token_strs": None})),
        (
            "POST",
            "/tokenize",
            {"prompt": "a bb", "return_token_strs": True},
            (JSON, {"tokens": [1, 2], "token_strs": ["x", "xx"]}),
        ),
        ("POST", "/detokenize", {"tokens": [1, 2]}, (JSON, {"prompt": "x xx"})),
        ("POST", "/abort", {"request_id": "nobody"}, (JSON, {"aborted": 0})),
        ("POST", "/flush_cache", None, (JSON, {"flushed": True})),
        ("GET", "/v1/models", None, (JSON, LIST)),
        ("GET", "/v1/models/fake", None, (JSON, CARD)),
        ("GET", "/health", None, (NOT_KEPT, {"status": "ok"})),
        ("GET", "/ready", None, (NOT_KEPT, {"ready": True, "model": "fake"})),
        ("GET", "/version", None, (NOT_KEPT, {"version": aengine.__version__})),
    ],
)
async def test_the_others(method: str, path: str, body: Any, expected: tuple[dict[str, str], dict[str, Any]]) -> None:
    headers, fields = expected
    if path == "/tokenize":
        fields = {"count": 2, "max_model_len": 64, **fields}
    async with serving() as server:
        assert await ask(server, method, path, body) == Answer(200, headers, fields)


async def test_several_requests_of_one_id_are_ended_together() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine) as server:
        asking = [asyncio.create_task(ask(server, "POST", GENERATE, {"prompt": "a"})) for _ in range(3)]
        streams = [await engine.next_stream() for _ in asking]
        assert (await ask(server, "POST", "/abort", {"request_id": REQUEST_ID})).body == {"aborted": 3}
        assert all(stream.aborted.is_set() for stream in streams)
        await asyncio.gather(*asking)


async def test_an_id_is_told_in_any_case() -> None:
    async with serving() as server:
        for path in ("/health", "/nowhere", GENERATE):
            headers = (await server.client.get(path)).headers
            assert len(headers["x-request-id"]) == 32


async def test_the_names_of_the_metrics() -> None:
    async with serving() as server:
        answer = await ask(server, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    types = {tuple(line.split()[2:4]) for line in answer.body.splitlines() if line.startswith("# TYPE aengine_")}
    assert types == {
        ("aengine_ready", "gauge"),
        ("aengine_loop_delay_seconds", "gauge"),
        ("aengine_sends_blocked", "gauge"),
        ("aengine_stalled_readers_total", "counter"),
        ("aengine_http_responses_total", "counter"),
        ("aengine_request_decode_seconds", "histogram"),
        ("aengine_request_generated_tokens", "histogram"),
        ("aengine_request_prefill_seconds", "histogram"),
        ("aengine_request_prompt_tokens", "histogram"),
        ("aengine_step_tokens", "histogram"),
        ("aengine_requests_running", "gauge"),
        ("aengine_requests_waiting", "gauge"),
        ("aengine_kv_pages", "gauge"),
        ("aengine_kv_pages_used", "gauge"),
        ("aengine_kv_pages_cached", "gauge"),
        ("aengine_kv_pages_free", "gauge"),
        ("aengine_kv_usage_ratio", "gauge"),
        ("aengine_prefix_hit_ratio", "gauge"),
        ("aengine_requests_total", "counter"),
        ("aengine_steps_total", "counter"),
        ("aengine_prompt_tokens_total", "counter"),
        ("aengine_cached_tokens_total", "counter"),
        ("aengine_computed_tokens_total", "counter"),
        ("aengine_generated_tokens_total", "counter"),
        ("aengine_preemptions_total", "counter"),
        ("aengine_time_to_first_token_seconds", "histogram"),
        ("aengine_inter_token_latency_seconds", "histogram"),
        ("aengine_request_latency_seconds", "histogram"),
        ("aengine_request_queue_time_seconds", "histogram"),
        ("aengine_outputs_total", "counter"),
    }
