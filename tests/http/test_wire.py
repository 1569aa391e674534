"""Every answer as sent over the wire. These tests change whenever clients see a change."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import aengine
from aengine.types import Fragment, PromptLogprob, TokenLogprob, TopLogprob, Usage
from tests.http.fake_engine import CARD, FakeEngine
from tests.http.serving import serving
from tests.http.wire import NOW, REQUEST_ID, Answer, ask
from tests.http.wire_requests import (
    ALL_THE_TIME,
    CHAT,
    COMPLETIONS,
    GENERATE,
    HELLO,
    JSON,
    WITH_USAGE,
    Saying,
    held,
    post,
    streamed,
    usage,
)

pytestmark = pytest.mark.anyio

NOT_KEPT = {**JSON, "cache-control": "no-store"}


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


async def test_the_prompts_logprobs_at_every_endpoint() -> None:
    requested: dict[str, Any] = {"prompt_logprobs": 2, "stream": False}
    generated = await held(GENERATE, SCORED, prompt="a bbb", **requested)
    completed = await held(COMPLETIONS, SCORED, prompt="a bbb", **requested)
    chatted = await held(CHAT, SCORED, **HELLO, **requested)
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
