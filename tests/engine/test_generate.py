"""The Python API from a user's point of view."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine import ContextLengthError, InvalidRequestError, SamplingParams
from aengine.engine.requests.live import sibling_seed
from aengine.model.loading.hub import resolve_model
from aengine.types import join_calls

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    """The whole demo model, because these tests check its text."""


PROMPT = "The capital of France is"


async def test_fragments_stream_the_text(engine: aengine.Engine) -> None:
    fragments = [fragment async for fragment in engine.generate(PROMPT, max_tokens=20, temperature=0)]
    assert "".join(fragment.text for fragment in fragments).startswith(" Paris")
    assert [fragment.finish_reason for fragment in fragments[:-1]] == [None] * (len(fragments) - 1)
    assert fragments[-1].finish_reason in ("stop", "length")
    assert all(fragment.usage is None for fragment in fragments[:-1])
    usage = fragments[-1].usage
    assert usage is not None
    assert usage.completion_tokens == sum(len(fragment.token_ids) for fragment in fragments)
    assert usage.prompt_tokens == len(engine.tokenizer.encode_now(PROMPT))


async def test_complete_equals_the_stream(engine: aengine.Engine) -> None:
    completion = await engine.complete(PROMPT, max_tokens=20, temperature=0)
    fragments = [fragment async for fragment in engine.generate(PROMPT, max_tokens=20, temperature=0)]
    assert completion.text == "".join(fragment.text for fragment in fragments)
    assert completion.token_ids == tuple(token for fragment in fragments for token in fragment.token_ids)
    assert completion.finish_reason == fragments[-1].finish_reason


async def test_an_answer_ends_where_only_the_tokenizer_says_what_ends_it(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve_model(None, None), tmp_path / "model"))
    (folder / "generation_config.json").unlink()
    fields = json.loads((folder / "config.json").read_text())
    del fields["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(fields))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    async with aengine.Engine(str(folder), device="cpu", kv_cache_gib=0.05, cuda_graphs=False) as engine:
        answer = await engine.chat(question, temperature=0, max_tokens=200)
    assert answer.finish_reason == "stop"
    assert "Paris" in answer.text


WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHATS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": WEATHER}],
    },
    {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "template_kwargs": {"enable_thinking": True}},
]


@pytest.mark.parametrize("chat", CHATS, ids=["tools", "thought"])
async def test_thoughts_and_calls_come_apart_from_the_text(engine: aengine.Engine, chat: dict[str, Any]) -> None:
    answer = await engine.chat(**chat, temperature=0, n=2)
    fragments = [fragment async for fragment in engine.chat_stream(**chat, temperature=0)]
    assert "".join(fragment.text for fragment in fragments) == answer.text
    assert "".join(fragment.reasoning for fragment in fragments) == answer.reasoning
    calls = join_calls(call for fragment in fragments for call in fragment.tool_calls)
    named = [(call.name, json.loads(call.arguments)) for call in calls]
    assert named == [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    assert "<" not in answer.text + answer.reasoning
    if "tools" in chat:
        assert (named, answer.text) == ([("get_weather", {"city": "Paris"})], "")
    else:
        assert answer.reasoning
        assert "42" in answer.text
    assert [choice.text for choice in answer.choices] == [answer.text] * 2


async def test_tools_may_be_an_iterator(engine: aengine.Engine) -> None:
    chat = next(chat for chat in CHATS if "tools" in chat)
    answer = await engine.chat(**{**chat, "tools": iter(chat["tools"])}, temperature=0)
    assert [call.name for call in answer.tool_calls] == ["get_weather"]


async def test_a_prompt_may_be_token_ids(engine: aengine.Engine) -> None:
    ids = engine.tokenizer.encode_now(PROMPT)
    assert (await engine.complete(ids, max_tokens=5, temperature=0)).text == (
        await engine.complete(PROMPT, max_tokens=5, temperature=0)
    ).text


async def test_max_tokens_is_exact(engine: aengine.Engine) -> None:
    cases: list[int] = [1, 2, 7]
    for max_tokens in cases:
        completion = await engine.complete([300, 301, 302], max_tokens=max_tokens, temperature=0, ignore_eos=True)
        assert len(completion.token_ids) == max_tokens
        assert completion.finish_reason == "length"
        assert completion.usage.completion_tokens == max_tokens


@pytest.mark.slow
async def test_the_context_can_be_filled_to_the_last_token(engine: aengine.Engine) -> None:
    room = 5
    prompt = [300 + place % 50 for place in range(engine.max_model_len - room)]
    completion = await engine.complete(prompt, temperature=0, ignore_eos=True)
    assert len(completion.token_ids) == room


async def test_eos_ends_with_stop_and_its_text_stays_out(engine: aengine.Engine) -> None:
    reply = await engine.chat([{"role": "user", "content": "hi"}], temperature=0, max_tokens=64)
    assert reply.finish_reason == "stop"
    assert "<|im_end|>" not in reply.text
    assert reply.text.strip()
    eos = engine.tokenizer.encode_now("<|im_end|>")
    assert reply.token_ids[-1:] == tuple(eos)


async def test_stop_string_cuts_the_text_and_include_stop_keeps_it(engine: aengine.Engine) -> None:
    whole = (await engine.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)).text
    stop = whole[4:7]
    cut = await engine.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, stop=stop)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.choices[0].stop_string == stop
    kept = await engine.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, stop=stop, include_stop=True)
    assert kept.text == whole[: whole.index(stop)] + stop
    ended = await engine.complete(PROMPT, max_tokens=20, temperature=0, ignore_eos=True, stop="never written")
    assert (ended.text, ended.choices[0].stop_string) == (whole, None)
    assert cut.usage.completion_tokens == len(cut.token_ids)


async def test_stop_token_ids(engine: aengine.Engine) -> None:
    whole = await engine.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    cut = await engine.complete(PROMPT, max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=[stop])
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.finish_reason == "stop"
    assert cut.text == engine.tokenizer.decode(list(whole.token_ids[:first]))


async def test_min_tokens_holds_eos_back(engine: aengine.Engine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    short = await engine.chat(chat, temperature=0, max_tokens=64)
    longer = len(short.token_ids) + 3
    reply = await engine.chat(chat, temperature=0, max_tokens=64, min_tokens=longer)
    assert len(reply.token_ids) >= longer
    assert reply.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]


async def test_n_choices_share_the_prefill_and_differ(engine: aengine.Engine) -> None:
    before = engine.stats().computed_tokens
    completion = await engine.complete([300 + i for i in range(40)], max_tokens=10, n=4, temperature=1.5, seed=7)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in completion.choices}) == 4
    drawn = sum(len(choice.token_ids) for choice in completion.choices)
    assert completion.usage.completion_tokens == drawn
    stats = engine.stats()
    assert stats.computed_tokens - before <= 40 + drawn + stats.drafted_tokens
    alone = await engine.complete([300 + i for i in range(40)], max_tokens=10, n=1, temperature=1.5, seed=7)
    assert alone.token_ids == completion.choices[0].token_ids


async def test_each_choice_is_what_its_seed_draws_alone(engine: aengine.Engine) -> None:
    """40 tokens leave a page of 16 partly filled: every choice needs a copy of it."""
    prompt = [300 + i for i in range(40)]
    hot = {"max_tokens": 10, "temperature": 0.8, "ignore_eos": True}
    together = await engine.complete(prompt, n=4, seed=7, **hot)
    for choice in together.choices:
        alone = await engine.complete(prompt, seed=sibling_seed(7, choice.index), **hot)
        assert choice.token_ids == alone.token_ids


async def test_logprobs_name_the_sampled_token_and_the_most_likely(engine: aengine.Engine) -> None:
    completion = await engine.complete(PROMPT, max_tokens=4, temperature=0, logprobs=3)
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    for entry in completion.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0].token_id == entry.token_id  # greedy draws the most likely token
        assert entry.top[0].logprob == pytest.approx(entry.logprob)
        assert [candidate.logprob for candidate in entry.top] == sorted(
            (candidate.logprob for candidate in entry.top), reverse=True
        )
        assert entry.logprob <= 0


async def test_the_garbage_collector_does_not_walk_logprobs(engine: aengine.Engine) -> None:
    """256 outputs with candidates are a million objects: scanning them once takes as long as several steps."""
    completion = await engine.complete(PROMPT, max_tokens=4, temperature=0, logprobs=3)
    assert completion.logprobs is not None
    gc.collect()  # it untracks tuples without references
    for entry in completion.logprobs:
        assert not any(map(gc.is_tracked, (entry, entry.top, *entry.top)))


async def test_params_replace_the_defaults_and_single_fields_override_them(engine: aengine.Engine) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    assert len((await engine.complete([300, 301], params)).token_ids) <= 3
    with pytest.raises(InvalidRequestError, match="not both"):
        await engine.complete([300, 301], params, top_k=3)


async def test_bad_parameters_are_named(engine: aengine.Engine) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: 1e9}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ]
    for fields, named in cases:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.complete([300, 301], **fields)
        assert caught.value.param == named
        assert named in str(caught.value)


async def test_bad_prompts_are_refused(engine: aengine.Engine) -> None:
    for prompt in ("", [], [-1], [10**9]):
        with pytest.raises(InvalidRequestError) as caught:
            await engine.complete(prompt, max_tokens=1)
        assert caught.value.param == "prompt"


async def test_too_long_a_request_names_both_numbers(engine: aengine.Engine) -> None:
    prompt = [300] * 100
    with pytest.raises(
        ContextLengthError, match=rf"{engine.max_model_len} tokens.*100 tokens.*{engine.max_model_len - 50}"
    ):
        await engine.complete(prompt, max_tokens=engine.max_model_len - 50)
    with pytest.raises(ContextLengthError, match=str(engine.max_model_len + 1)):
        await engine.complete([300] * (engine.max_model_len + 1))
