"""Outputs follow their grammars, for any model and in any batch."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import anyio
import jsonschema
import msgspec
import pytest

import aengine
from aengine import Completion, InvalidRequestError, Structured
from aengine.text.grammar import matcher
from aengine.text.grammar.matcher import Mask, Matcher
from tests.engine.conftest import idle
from tests.engine.schemas import schema
from tests.engine.test_lifetime import sabotaged
from tests.rounding import near

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nGive me some data.<|im_end|>\n<|im_start|>assistant\n"
SMALL = {"device": "cpu", "kv_cache_gib": 0.1, "progress": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Structured(json=PERSON)
CODE = Structured(regex="[A-Z]{2}-[0-9]{3,5}(é|x)?")
FORMS: list[Structured | None] = [JSON, None, CODE, Structured(choice=("yes", "no", "maybe")), None, JSON, None, CODE]


def check(completion: Completion, structured: Structured | None) -> None:
    for choice in completion.choices:
        if structured is None:
            continue
        assert choice.finish_reason == "stop", choice.text
        if structured.json is not None:
            jsonschema.validate(json.loads(choice.text), structured.json)
        if structured.regex is not None:
            assert re.fullmatch(structured.regex, choice.text)
        if structured.choice is not None:
            assert choice.text in structured.choice


@pytest.mark.slow
@pytest.mark.parametrize(("load_format", "temperature"), [("auto", 0.0), ("dummy", 1.0)], ids=["demo", "random"])
async def test_whatever_ends_with_stop_validates(load_format: str, temperature: float) -> None:
    """200 schemas. At least 95 % of the outputs end by themselves."""
    schemas = [schema(seed) for seed in range(200)]
    sampling = {"max_tokens": 1000, "temperature": temperature}
    async with aengine.Engine(**SMALL, load_format=load_format, max_num_seqs=64) as engine:
        completions = await asyncio.gather(
            *(
                engine.complete(PROMPT, seed=seed, structured=Structured(json=wanted), **sampling)
                for seed, wanted in enumerate(schemas)
            )
        )
        await idle(engine)
    ended = 0
    judges = jsonschema.Draft202012Validator
    for wanted, completion in zip(schemas, completions, strict=True):
        if completion.finish_reason == "stop":
            ended += 1
            judges(wanted, format_checker=judges.FORMAT_CHECKER).validate(json.loads(completion.text))
    assert ended >= 190


async def complete_all(forms: list[Structured | None], **knobs: Any) -> tuple[list[Completion], aengine.Stats]:
    """Run one request for each kind of grammar, all at once, or one after the other with `alone=True`."""
    alone = knobs.pop("alone", False)
    options = [
        {
            "max_tokens": 40 if form is None else 150,
            "ignore_eos": form is None,
            "temperature": 0.9,
            "seed": number,
            "structured": form,
        }
        for number, form in enumerate(forms)
    ]
    async with aengine.Engine(**{**SMALL, "max_num_seqs": 32, **knobs}) as engine:
        if alone:
            completions = [await engine.complete(PROMPT + str(i), **own) for i, own in enumerate(options)]
        else:
            completions = await asyncio.gather(
                *(engine.complete(PROMPT + str(i), **own) for i, own in enumerate(options))
            )
        await idle(engine)
        return completions, engine.stats()


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    completions, _ = asyncio.run(complete_all(FORMS, alone=True, lookahead=False, prefix_cache=False))
    for completion, form in zip(completions, FORMS, strict=True):
        check(completion, form)
    return [completion.token_ids for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"lookahead": False},
        {"num_pages": 45, "page_size": 4, "max_model_len": 170, "prefix_cache": False},
        {"num_pages": 12, "page_size": 16, "max_model_len": 170},
        {"max_step_tokens": 8, "max_num_seqs": 8},
        {"max_num_seqs": 2},
    ],
    ids=["together", "no lookahead", "preempting", "preempting with a cache", "chunks of 8", "two rows"],
)
async def test_same_ids(knobs: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    """A request draws the same ids in any batch, with or without a grammar. In small pools some are preempted."""
    completions, stats = await complete_all(FORMS, **knobs)
    assert [completion.token_ids for completion in completions] == expected
    if "num_pages" in knobs:
        assert stats.preemptions > 0


async def test_unconstrained_rows_are_as_without_constrained_ones(expected: list[tuple[int, ...]]) -> None:
    completions, _ = await complete_all([None] * len(FORMS))
    for completion, form, ids in zip(completions, FORMS, expected, strict=True):
        if form is None:
            assert completion.token_ids == ids


async def test_every_choice_of_n_follows_the_grammar_by_itself(engine: aengine.Engine) -> None:
    completion = await engine.complete(PROMPT, n=8, seed=3, temperature=1.0, max_tokens=150, structured=JSON)
    check(completion, JSON)
    assert len({choice.text for choice in completion.choices}) > 1


async def test_the_grammar_ends_the_output_whatever_else_forbids_it(engine: aengine.Engine) -> None:
    completion = await engine.complete(
        PROMPT, structured=CODE, max_tokens=100, min_tokens=90, ignore_eos=True, logit_bias={4091: -100, 4089: -100}
    )
    check(completion, CODE)


async def test_min_tokens_is_heard_where_the_grammar_leaves_a_choice(engine: aengine.Engine) -> None:
    completion = await engine.complete(PROMPT, structured=Structured(regex="a{1,50}"), min_tokens=20, max_tokens=60)
    assert completion.finish_reason == "stop"
    assert completion.usage.completion_tokens > 20


async def test_a_stop_string_ends_it_earlier_and_length_too(engine: aengine.Engine) -> None:
    stopped = await engine.complete(PROMPT, structured=JSON, stop='"age"', max_tokens=100)
    assert stopped.finish_reason == "stop"
    assert '"name"' in stopped.text
    assert '"age"' not in stopped.text
    cut = await engine.complete(PROMPT, structured=JSON, max_tokens=3)
    assert cut.finish_reason == "length"


async def test_logprobs_are_of_the_raw_distribution(engine: aengine.Engine) -> None:
    free = await engine.complete(PROMPT, max_tokens=1, temperature=0, logprobs=2)
    other = Structured(regex="[0-9]")  # not the most likely output
    bound = await engine.complete(PROMPT, max_tokens=1, temperature=0, logprobs=2, structured=other)
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert msgspec.to_builtins(bound.logprobs[0].top) == near(free.logprobs[0].top)
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


async def test_an_aborted_row_leaves_the_others_alone(engine: aengine.Engine) -> None:
    expected = await engine.complete(PROMPT, structured=JSON, max_tokens=150, temperature=0.9, seed=1)
    stream = engine.generate(PROMPT, structured=Structured(json_object=True), max_tokens=300, min_tokens=300)
    await anext(stream)
    async with anyio.create_task_group() as group:

        async def leave() -> None:
            await anext(stream)
            await stream.aclose()

        group.start_soon(leave)
        again = await engine.complete(PROMPT, structured=JSON, max_tokens=150, temperature=0.9, seed=1)
    assert again.token_ids == expected.token_ids


@pytest.mark.parametrize(
    "how", ["spoil", *(pytest.param(how, marks=pytest.mark.slow) for how in ("fail_launch", "fail_result"))]
)
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(5, marks=pytest.mark.slow)])
async def test_a_failing_step_ends_its_requests_and_the_engine_continues(how: str, at: int) -> None:
    engine, made = sabotaged()
    async with engine:
        expected = await engine.complete(PROMPT, structured=JSON, max_tokens=150, seed=1, temperature=0.9)
        step = engine.stats().steps + at
        if how == "spoil":
            made[0].spoil[step] = 0
        else:
            getattr(made[0], how).add(step)
        with pytest.raises(aengine.EngineFailedError):
            await engine.complete(PROMPT, structured=JSON, max_tokens=150, seed=1, temperature=0.9)
        assert made[0].given_up == ([step + 1] if how == "fail_result" else [])  # it ended before its pages were freed
        await idle(engine)
        again = await engine.complete(PROMPT, structured=JSON, max_tokens=150, seed=1, temperature=0.9)
        assert again.token_ids == expected.token_ids


async def test_masks_that_cannot_be_filled_fail_the_step_alone(engine: aengine.Engine) -> None:
    assert engine._service.loop is not None
    fill = engine._service.loop._fill_masks

    async def broken(matchers: object, drafts: object) -> Any:
        raise RuntimeError("no masks")

    engine._service.loop._fill_masks = broken
    with pytest.raises(aengine.EngineFailedError, match="RuntimeError"):
        await engine.complete(PROMPT, structured=JSON)
    engine._service.loop._fill_masks = fill
    check(await engine.complete(PROMPT, structured=JSON, max_tokens=150), JSON)


@pytest.mark.slow
async def test_slow_masks_change_no_output(monkeypatch: pytest.MonkeyPatch, expected: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(matcher, "SLOW_SECONDS", -1.0)
    completions, _ = await complete_all(FORMS)
    assert [completion.token_ids for completion in completions] == expected


async def test_no_request_waits_for_the_slow_mask_of_another(
    engine: aengine.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late mask is computed while steps run without its sequence."""
    monkeypatch.setattr(matcher, "SLOW_SECONDS", -1.0)
    fill, filling, go_on = Matcher.fill, threading.Event(), threading.Event()

    def held(self: Matcher, mask: Mask) -> Mask:
        if threading.current_thread().name.startswith("aengine-slow-masks"):
            filling.set()
            go_on.wait(20)
        return fill(self, mask)

    monkeypatch.setattr(Matcher, "fill", held)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:

            async def slow() -> None:
                check(await engine.complete(PROMPT, structured=CODE), CODE)
                assert go_on.is_set()

            group.start_soon(slow)
            await anyio.to_thread.run_sync(filling.wait)
            neighbour = await engine.complete(PROMPT, max_tokens=30, ignore_eos=True)
            assert neighbour.usage.completion_tokens == 30
            assert not go_on.is_set()
            go_on.set()
    await idle(engine)


async def test_a_grammar_that_becomes_too_large_ends_its_request_alone(engine: aengine.Engine) -> None:
    """Its automaton exceeds its bound during the output."""
    growing = Structured(regex=r"[\w\d\p{L}]{1,500}" * 50)
    async with anyio.create_task_group() as group:

        async def fails() -> None:
            with pytest.raises(InvalidRequestError, match="cannot go on after") as caught:
                await engine.complete(PROMPT, structured=growing, max_tokens=400, temperature=1.0, seed=5)
            assert caught.value.param == "structured.regex"

        group.start_soon(fails)
        check(await engine.complete(PROMPT, structured=JSON, max_tokens=150), JSON)


async def test_what_cannot_be_compiled_is_refused_at_the_door(engine: aengine.Engine) -> None:
    for given, param in (
        (Structured(json={"type": "no"}), "structured.json"),
        ({"regex": "("}, "structured.regex"),
        ({"regexp": "a"}, "structured"),
        ({"choice": "ab"}, "structured.choice"),
        ("a+", "structured"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await engine.submit("a", structured=given)
        assert caught.value.param == param
    assert engine.stats().waiting == engine.stats().running == 0


async def test_a_plain_mapping_will_do(engine: aengine.Engine) -> None:
    completion = await engine.complete(PROMPT, structured={"choice": ["left", "right"]})
    assert completion.text in ("left", "right")
