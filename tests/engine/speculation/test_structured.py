"""Outputs with a grammar verify drafts: their tokens are those without speculation, and follow the grammar.

Wrong drafts are tokens of JSON, markers and ends, so that grammars allow many of them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio
import jsonschema
import pytest

import aengine
from aengine import Structured
from aengine.model.loading.hub import resolve_model
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.grammar import matcher
from aengine.text.grammar.calls import CallGrammar
from aengine.text.tokens.tokenizer import Tokenizer
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.engine.schemas import schema
from tests.engine.speculation.answers import (
    EOS,
    SHARED,
    Request,
    answers,
    assert_same,
    book_of,
    speculating,
    without_speculation,
)
from tests.engine.speculation.replay import Drafts
from tests.engine.speculation.test_answers import VARIANTS

pytestmark = pytest.mark.anyio

MARKERS = {"<think>": 4092, "</think>": 4093, "<tool_call>": 4094, "</tool_call>": 4095}
LIKELY = dict.fromkeys(MARKERS.values(), 9.0)  # logit_bias: the demo model rarely writes markers by itself
ARGUMENTS = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
CALLS = CallGrammar([CallableTool("f", ARGUMENTS), CallableTool("g")], FORMATS["hermes"], tokens=MARKERS)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = Structured(json=PERSON)
FORMS: dict[str, Structured] = {
    "JSON": JSON,
    "any object": Structured(json_object=True),
    "regex": Structured(regex="[A-Z]{2}-[0-9]{3,5}(é|x)?"),
    "one token": Structured(choice=("a",)),
    "choice": Structured(choice=("yes", "no", "yesterday and today")),
    "JSON after a thought": Structured(json=PERSON, thought="open"),
    "JSON, perhaps after a thought": Structured(json=PERSON, thought="possible"),
    "regex after a thought": Structured(regex="(ab?){1,9}", thought="open"),
    "calls": Structured(grammar=CALLS.forced()),
    "calls after a thought": Structured(grammar=CALLS.forced("open")),
    "calls within text": Structured(grammar=CALLS.within_text("possible")),
    "JSON or calls": Structured(json=PERSON, calls=CALLS.rules(), thought="open"),
    "no way back": Structured(grammar='start: x y\nx[max_tokens=5]: /[a-z]*/\ny: "!"'),
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "bad_words": ['":', "the"], "logprobs": 0},
    {"temperature": 0.7, "min_tokens": 12},
]


def _requests() -> list[Request]:
    """Return a request for each form, and between them requests without a grammar."""
    requests: list[Request] = []
    for number, form in enumerate(FORMS.values()):
        prompt = [*SHARED[: 3 * number], 300 + number]
        sampling = {**SAMPLING[number % len(SAMPLING)], "seed": number, "max_tokens": 32}
        requests.append((prompt, {**sampling, "logit_bias": LIKELY, "structured": form}))
        if number % 3 == 0:
            requests.append((prompt, {**sampling, "ignore_eos": True}))
    return requests


REQUESTS = _requests()


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    found = asyncio.run(without_speculation(REQUESTS))
    written = {token for completion in found for choice in completion.choices for token in choice.token_ids}
    assert written >= {EOS, *MARKERS.values()}  # drafts are verified across each of them
    return found


@pytest.fixture(scope="module")
def wrong() -> list[int]:
    """Tokens that grammars allow in many places."""
    text = '{"name": "a b", "age": 17, "f": [{}, true]}, \n'
    return [*Tokenizer.load(resolve_model(None, None)).encode_now(text), *MARKERS.values(), EOS]


async def compare(requests: list[Request], expected: list[Completion], drafts: Drafts, **knobs: Any) -> aengine.Stats:
    drafts.book = book_of(requests, expected)
    async with speculating(drafts, **knobs) as engine:
        found = await answers(engine, requests)
        stats = engine.stats()
    assert_same(found, expected, requests)
    return stats


@pytest.mark.parametrize("right", [0.7, pytest.param(0.0, marks=pytest.mark.slow)])
async def test_ids_are_those_without_speculation(right: float, expected: list[Completion], wrong: list[int]) -> None:
    await compare(REQUESTS, expected, Drafts(right=right, wrong=wrong))


@pytest.mark.slow
@pytest.mark.turns("drafts")
@pytest.mark.parametrize("drafts", [(0.0, 4), (0.5, 8), (0.8, 1), (1.0, 15)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
async def test_ids_with_any_number_of_drafts(
    name: str, drafts: tuple[float, int], expected: list[Completion], wrong: list[int]
) -> None:
    """Numbers and shares of right drafts take turns: one for each variant."""
    right, most = drafts
    await compare(REQUESTS, expected, Drafts(right=right, most=most, wrong=wrong), **VARIANTS[name])


async def test_right_drafts_save_steps_of_outputs_with_a_grammar() -> None:
    requests: list[Request] = [
        ([300 + number], {"temperature": 0, "max_tokens": 40, "logit_bias": LIKELY, "structured": form})
        for number, form in enumerate(FORMS.values())
        if form is not FORMS["no way back"]
    ]
    expected = await without_speculation(requests)
    drafts = Drafts()
    stats = await compare(requests, expected, drafts)
    assert stats.steps < max(len(completion.token_ids) for completion in expected) / 2
    assert drafts.accepted > 0.9 * drafts.verified - len(requests) * drafts.most  # those after an output's end


async def test_an_output_with_slow_masks_verifies_no_drafts(
    expected: list[Completion], wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "SLOW_SECONDS", -1.0)
    bound = [index for index, (_, params) in enumerate(REQUESTS) if "structured" in params][::3]
    drafts = Drafts(wrong=wrong)
    await compare([REQUESTS[index] for index in bound], [expected[index] for index in bound], drafts)
    assert drafts.verified == 0


async def test_an_aborted_output_leaves_the_others_alone(expected: list[Completion], wrong: list[int]) -> None:
    """It ends while a step is in flight that verifies its drafts."""
    drafts = Drafts(book_of(REQUESTS, expected), right=0.7, wrong=wrong)
    async with speculating(drafts) as engine, anyio.create_task_group() as group:

        async def leave(after: int) -> None:
            stream = engine.generate([299], structured=Structured(json_object=True), max_tokens=300, min_tokens=300)
            for _ in range(after):
                await anext(stream)
            await stream.aclose()

        for after in range(1, 7):
            group.start_soon(leave, after)
        found = await answers(engine, REQUESTS)
        await idle(engine)
    assert_same(found, expected, REQUESTS)


async def test_a_stop_string_ends_an_output_with_a_grammar() -> None:
    requests: list[Request] = [
        ([300], {"temperature": 0, "max_tokens": 60, "structured": JSON, "stop": [stop]})
        for stop in ('"age"', "e", ":")
    ]
    expected = await without_speculation(requests)
    assert all(completion.finish_reason == "stop" for completion in expected)
    await compare(requests, expected, Drafts())


async def test_a_grammar_that_becomes_too_large_ends_its_request_alone(wrong: list[int]) -> None:
    """Its automaton exceeds its bound during the output."""
    growing = Structured(regex=r"[\w\d\p{L}]{1,500}" * 50)
    others: list[Request] = [([301], {"temperature": 0, "max_tokens": 60, "structured": JSON})]
    expected = await without_speculation(others)
    drafts = Drafts(book_of(others, expected), right=0.7, wrong=wrong)
    async with speculating(drafts) as engine, anyio.create_task_group() as group:

        async def fails() -> None:
            with pytest.raises(aengine.InvalidRequestError, match="cannot go on after"):
                await engine.complete([300], structured=growing, max_tokens=400, temperature=1.0, seed=5)

        group.start_soon(fails)
        found = await answers(engine, others)
    assert_same(found, expected, others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("thought", "temperature", "right"), [("never", 0.0, 0.9), ("open", 0.9, 0.4)], ids=["greedy", "thought-seeded"]
)
async def test_ids_of_200_schemas_are_those_without_speculation(
    thought: Any, temperature: float, right: float, wrong: list[int]
) -> None:
    """Every second schema is drawn greedily, the others after a thought."""
    seeds = range(0 if thought == "never" else 1, 200, 2)
    schemas = [schema(seed) for seed in seeds]
    requests: list[Request] = [
        (
            [*SHARED[: seed % 7], 300 + seed],
            {
                "temperature": temperature,
                "seed": seed,
                "max_tokens": 120,
                "logit_bias": {MARKERS["</think>"]: 9.0},
                "structured": Structured(json=wanted, thought=thought),
            },
        )
        for seed, wanted in zip(seeds, schemas)
    ]
    expected = await without_speculation(requests)
    drafts = Drafts(right=right, wrong=wrong)
    await compare(requests, expected, drafts)
    assert drafts.accepted > 500
    judges = jsonschema.Draft202012Validator
    ended = 0
    for wanted, completion in zip(schemas, expected, strict=True):
        if completion.finish_reason == "stop":
            ended += 1
            text = completion.text.rpartition("</think>")[2]
            judges(wanted, format_checker=judges.FORMAT_CHECKER).validate(json.loads(text))
    assert ended > 50
