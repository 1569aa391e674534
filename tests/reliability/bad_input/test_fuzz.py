"""Requests made up at random: nothing crashes, nothing is answered with a fault of the server's, nothing is lost.

`FUZZ_CASES=5000` tries that many of each kind instead of 300, other ones in each run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.reliability.bad_input.fields import BODIES, STRUCTS
from tests.reliability.bad_input.hostile import Hostile, hostile_demo

CASES = int(os.environ.get("FUZZ_CASES", "300"))
FUZZ = {
    "deadline": None,
    "database": None,
    "derandomize": CASES == 300,
    "phases": [Phase.generate, Phase.shrink],
    "suppress_health_check": list(HealthCheck),
}
GENERATE, COMPLETIONS, CHAT = BODIES
ENDPOINTS = [*BODIES, "/tokenize", "/detokenize", "/abort"]


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Hostile]:
    with hostile_demo(max_model_len=64, grammar_seconds=1.0) as hostile:
        yield hostile


numbers = st.one_of(
    st.integers(-3, 30),
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 4095, 4096]),
    st.floats(-3, 3),
    st.floats(),
)
texts = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(), max_size=40),  # with lone surrogates
    st.sampled_from(["", "<|im_end|>", "\0", "\ud800", "a" * 2000, "{{ 1 }}", "[INST]", "</think>", "<tool_call>"]),
)
junk = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
ids = st.lists(st.integers(0, 4095), min_size=1, max_size=20)
flags = st.booleans()
scores = st.integers(0, 20)
schemas = st.one_of(
    st.sampled_from(
        [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "array", "items": {"type": "string", "pattern": "^a+$"}},
            {"anyOf": [{"type": "null"}, {"enum": [1, "b"]}]},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}},
            {},
        ]
    ),
    st.dictionaries(st.sampled_from(["type", "items", "enum", "pattern", "properties", "minimum", "$ref"]), junk),
)
regexes = st.one_of(st.sampled_from(["a+", "[0-9]{1,3}", "(a|b)*c", "\\d", "(", "\\p{L}+"]), texts)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g h"]), "arguments": texts | schemas})},
    optional={"id": texts, "type": st.just("function")},
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles},
        optional={
            "content": st.one_of(
                texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
            ),
            "name": texts,
            "tool_calls": st.lists(calls, max_size=2),
            "tool_call_id": texts,
            "reasoning_content": texts,
            "reasoning": texts,
        },
    ),
    min_size=1,
    max_size=4,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "get_weather"])},
                optional={"description": texts, "parameters": schemas},
            ),
        }
    ),
    max_size=3,
)
prompts = st.one_of(texts, st.just("The capital of France is"), ids)

# Valid values by field name. A field of the structs without an entry is a KeyError.
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 20),
    "max_completion_tokens": st.integers(1, 20),
    "min_tokens": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 50),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 4095).map(str), st.floats(-100, 100), max_size=5),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": texts | st.lists(texts, max_size=4),
    "stop_token_ids": ids,
    "allowed_token_ids": ids,
    "bad_words": st.lists(texts, max_size=4),
    "include_stop": flags,
    "include_stop_str_in_output": flags,
    "prompt_logprobs": scores,
    "ignore_eos": flags,
    "skip_special_tokens": flags,
    "shown_special_ids": ids,
    "speculation": flags,
    "n": st.integers(1, 4),
    "model": st.just("aengine-demo"),
    "priority": st.integers(-5, 5),
    "cache_salt": texts,
    "user": texts,
    "response_format": st.one_of(
        st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
        schemas.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
    ),
    "structured_outputs": st.one_of(
        schemas.map(lambda schema: {"json": schema}),
        regexes.map(lambda regex: {"regex": regex}),
        st.lists(texts, max_size=3).map(lambda choices: {"choice": choices}),
        texts.map(lambda text: {"grammar": f"start: {json.dumps(text)}"}),
    ),
    "guided_json": schemas,
    "guided_regex": regexes,
    "guided_choice": st.lists(texts, min_size=1, max_size=3),
    "guided_grammar": st.sampled_from(['start: "a"', "start: /a+/", "start: x", "start: start", "%llguidance {}"]),
    "prompt": prompts | st.lists(prompts, max_size=3),
    "input_ids": ids,
    "messages": messages,
    "tools": tools,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "parallel_tool_calls": flags,
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "x", "tools"]), flags),
    "reasoning_effort": st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh", "max"]),
    "add_generation_prompt": flags,
    "continue_final_message": flags,
    "fill_context": flags,
    "logprobs": scores | flags,
    "top_logprobs": scores,
    "truncate_prompt_tokens": st.integers(1, 20),
    "stream": flags,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": flags, "continuous_usage_stats": flags}),
    "echo": flags,
    "return_token_ids": flags,
    "return_tokens_as_token_ids": flags,
    "stop_in_thought": flags,
    "unstopped": st.lists(texts, min_size=2, max_size=2),
    "best_of": st.integers(1, 3),
    "suffix": texts,
}
# These fields exclude each other. Most requests have none.
NEEDED = {GENERATE: {"prompt": prompts}, COMPLETIONS: {"prompt": LIKELY["prompt"]}, CHAT: {"messages": messages}}


@st.composite
def requests(draw: st.DrawFn, endpoint: str) -> dict[str, Any]:
    """Some fields, mostly with valid values, and junk in one of four cases."""
    names = draw(st.lists(st.sampled_from(sorted(STRUCTS[endpoint].__struct_fields__)), unique=True, max_size=6))
    body = {name: draw(strategy) for name, strategy in NEEDED[endpoint].items()}
    body |= {name: draw(LIKELY[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(sorted(body)))] = draw(junk)
    return body


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", BODIES)
def test_requests_with_any_values(fuzzed: Hostile, endpoint: str) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=CASES // 3, **FUZZ)
    @given(requests(endpoint))
    def holds(body: dict[str, Any]) -> None:
        statuses[fuzzed.post(endpoint, json.dumps(body)).status_code] += 1

    holds()
    fuzzed.settled()
    print(f"{endpoint}: {dict(statuses)}")
    assert statuses[200] > CASES // 100, statuses  # else little was tried
    assert statuses[400] > CASES // 100, statuses


def test_the_strategies_know_every_field() -> None:
    assert {name for struct in STRUCTS.values() for name in struct.__struct_fields__} == set(LIKELY)


SEEDS = [
    json.dumps(body).encode()
    for body in (
        *BODIES.values(),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "é\n"}]}], "max_tokens": 3, "stream": True},
        {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "max_tokens": 2, "stop": ["x"], "logit_bias": {"7": 1.5}},
        {"prompt": "a", "guided_json": {"type": "object"}, "max_tokens": 5, "n": 2},
        {"tokens": [1, 2, 3]},
        {"request_id": "a"},
    )
]
PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\\u",
    b"\\ud800",
    b"null",
    b"NaN",
    b"-",
    b"1e999",
    b"\0",
    b"\xff",
    b"9" * 30,
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good body with some bytes cut out, put in, doubled or changed."""
    body = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = min(len(body), start + draw(st.integers(0, 12)))
        put = draw(
            st.one_of(st.just(b""), st.sampled_from(PIECES), st.binary(max_size=4), st.just(body[start:end] * 2))
        )
        body = body[:start] + put + body[end:]
    return body


@pytest.mark.slow
def test_bodies_of_any_bytes(fuzzed: Hostile) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=CASES, **FUZZ)
    @given(
        st.sampled_from(ENDPOINTS),
        st.one_of(mutated(), mutated(), st.binary(max_size=300)),
        st.sampled_from(["application/json", "application/json", "application/x-www-form-urlencoded", "text/plain"]),
    )
    def holds(endpoint: str, body: bytes, content_type: str) -> None:
        statuses[fuzzed.post(endpoint, body, **{"Content-Type": content_type}).status_code] += 1

    holds()
    fuzzed.settled()
    print(f"bytes: {dict(statuses)}")
    assert statuses[200] > CASES // 100, statuses
    assert statuses[400] > CASES // 5, statuses
