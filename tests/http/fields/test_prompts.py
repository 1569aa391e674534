"""The bound on an answer's logprobs. A refusal has the field, the number and the bound."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
IDS = [5] * 10
HI = [{"role": "user", "content": "hi"}]

# The bound is 1,000.
TOO_MANY: list[tuple[str, dict[str, Any], str, int]] = [
    (COMPLETIONS, {"prompt": IDS, "echo": True, "logprobs": 9, "n": 11, "max_tokens": 1}, "logprobs", 1210),
    (COMPLETIONS, {"prompt": IDS, "echo": True, "logprobs": 9, "n": 11, "stream": True}, "logprobs", 1100),
    (COMPLETIONS, {"prompt": "a b c d e f", "echo": True, "logprobs": 9, "n": 20, "max_tokens": 0}, "logprobs", 1400),
    (COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 20, "n": 5}, "prompt_logprobs", 1050),
    (COMPLETIONS, {"prompt": [IDS] * 11, "prompt_logprobs": 9}, "prompt_logprobs", 1100),
    (COMPLETIONS, {"prompt": ["a"] * 11, "logprobs": 9, "max_tokens": 10}, "logprobs", 1100),
    (COMPLETIONS, {"prompt": "a", "logprobs": 20, "n": 10, "max_tokens": 5}, "logprobs", 1050),
    (
        COMPLETIONS,
        {"prompt": IDS, "echo": True, "logprobs": 4, "prompt_logprobs": 4, "n": 11, "max_tokens": 0},
        "prompt_logprobs",
        1155,
    ),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 10, "max_tokens": 5}, "top_logprobs", 1050),
    (CHAT, {"messages": HI, "logprobs": True, "n": 128, "max_tokens": 8}, "top_logprobs", 1024),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 60}], "prompt_logprobs": 20}, "prompt_logprobs", 1260),
    (GENERATE, {"input_ids": IDS, "prompt_logprobs": 20, "n": 5}, "prompt_logprobs", 1050),
    (GENERATE, {"prompt": "a", "logprobs": 20, "n": 10, "max_tokens": 5, "stream": False}, "logprobs", 1050),
]

ENOUGH: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": IDS, "echo": True, "logprobs": 9, "n": 9, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [IDS] * 10, "prompt_logprobs": 9}),
    (COMPLETIONS, {"prompt": "a", "logprobs": 20, "n": 128, "max_tokens": 50, "stream": True}),  # nothing is kept
    (COMPLETIONS, {"prompt": [IDS] * 8, "n": 128}),  # no logprobs at all
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 50, "stream": True}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a " * 40}], "prompt_logprobs": 20, "n": 128},
    ),  # they are in the answer once
    (GENERATE, {"input_ids": IDS, "prompt_logprobs": 20, "n": 128, "stream": False}),
    (GENERATE, {"input_ids": IDS, "prompt_logprobs": 20, "n": 4}),
]


async def test_too_many_are_refused_by_name() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine, max_answer_candidates=1000) as server:
        for path, body, param, count in TOO_MANY:
            response = await server.post(path, **body)
            case = f"{body}: {response.text}"
            assert response.status_code == 400, case
            error = response.json()["error"]
            assert error["param"] == param, case
            assert f"{count} candidates" in error["message"], case
            assert "1000" in error["message"], case
            assert "max_answer_candidates" in error["message"], case
        for _ in engine.submitted:  # the first of a list of prompts
            assert (await engine.next_stream()).aborted.is_set()


async def test_requests_within_the_bound_are_answered() -> None:
    async with serving(max_answer_candidates=1000) as server:
        for path, body in ENOUGH:
            response = await server.post(path, **body)
            assert response.status_code == 200, f"{body}: {response.text}"


async def test_values_out_of_range_are_refused_as_such() -> None:
    async with serving(max_answer_candidates=1000) as server:
        for field, value in [("n", 10**9), ("prompt_logprobs", 10**9), ("logprobs", 10**9), ("prompt_logprobs", -1)]:
            requested = {"prompt": "a", "logprobs": 1, "max_tokens": 1} | {field: value}
            error = (await server.post(COMPLETIONS, **requested)).json()["error"]
            assert (error["param"], f"got {value}" in error["message"]) == (field, True)


async def test_without_max_tokens_the_output_ends_at_the_bound() -> None:
    """If the bound is nearer than the end of the context, and the answer is not streamed."""
    engine = FakeEngine()
    chat = {"messages": HI, "logprobs": True, "top_logprobs": 9}
    async with serving(engine, max_answer_candidates=1000) as server:
        for more in ({"n": 4}, {}, {"n": 4, "stream": True}):
            assert (await server.post(CHAT, **chat, **more)).status_code == 200
        filling = {"prompt": "a", "fill_context": True, "logprobs": 9, "n": 4, "stream": False}
        assert (await server.post(GENERATE, **filling)).status_code == 200
    assert [one.params.max_tokens for one in engine.submitted] == [25, None, None, 25]


@pytest.mark.slow
def test_an_answer_with_logprobs_of_a_long_prompt(demo: httpx2.Client) -> None:
    """Evaluations ask for the logprobs of all tokens of several prompts."""
    prompts = [[(7 * place + start) % 4000 for place in range(500)] for start in range(4)]
    requested = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 2}
    choices = demo.post(COMPLETIONS, json=requested).json()["choices"]
    for choice, prompt in zip(choices, prompts, strict=True):
        reported = choice["logprobs"]
        assert {len(reported[name]) for name in reported} == {len(prompt)}
        assert reported["text_offset"][-1] + len(reported["tokens"][-1]) == sum(map(len, reported["tokens"]))
        assert [one is None for one in reported["token_logprobs"]] == [True] + [False] * (len(prompt) - 1)
        assert len(choice["prompt_logprobs"]) == len(prompt)


def test_a_streamed_echo_is_the_same_in_pieces(demo: httpx2.Client) -> None:
    prompt = [(7 * place) % 4000 for place in range(300)]
    requested = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 2, "temperature": 0, "n": 2}
    whole = demo.post(COMPLETIONS, json=requested).json()["choices"]
    events = streamed(demo, requested | {"stream": True})
    for choice in whole:
        own = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        for name in ("tokens", "text_offset", "token_logprobs"):
            joined = [value for one in own if one["logprobs"] for value in one["logprobs"][name]]
            assert joined[1:] == pytest.approx(choice["logprobs"][name][1:], abs=1e-3) if "log" in name else True
            assert len(joined) == len(prompt) + 2
            assert name == "token_logprobs" or joined == choice["logprobs"][name]


def streamed(client: httpx2.Client, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", COMPLETIONS, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]
