"""Loose arguments work, wrong ones are refused by name, and other requests are not affected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time
from typing import Any

import anyio.to_thread
import pytest

import aengine
from aengine import InvalidRequestError, SamplingParams
from aengine.engine.requests.arguments import one_prompt
from aengine.requests.sampling_params import check_token_ids

pytestmark = pytest.mark.anyio

PROMPT = "The capital of France is"


async def test_one_stop_string_in_params_is_one_stop_string(engine: aengine.Engine) -> None:
    whole = (await engine.complete(PROMPT, max_tokens=12, temperature=0)).text
    stop = whole[10:14]
    loose = SamplingParams(max_tokens=12, temperature=0, stop=stop)  # type: ignore[arg-type]
    assert (await engine.complete(PROMPT, loose)).text == whole[: whole.index(stop)] != ""


async def test_lists_and_none_in_params_mean_what_they_mean_as_single_fields(engine: aengine.Engine) -> None:
    first = (await engine.complete(PROMPT, max_tokens=1, temperature=0)).token_ids[0]
    loose = SamplingParams(stop=None, stop_token_ids=[first], logit_bias=None, temperature=0)  # type: ignore[arg-type]
    assert (await engine.complete(PROMPT, loose)).finish_reason == "stop"


async def test_what_cannot_be_meant_is_refused_by_name(engine: aengine.Engine) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": b"bytes are no ids"}, "prompt"),
        ({"params": {"max_tokens": 3}}, "params"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"priority": 10**400}, "priority"),
        ({"priority": float("nan")}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"cache_salt": ["unhashable"]}, "cache_salt"),
    ]
    for given, named in cases:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.complete(**{"prompt": PROMPT, **given})
        assert caught.value.param == named
    assert engine.failure is None


async def test_a_name_of_another_api_is_answered_with_the_one_here(engine: aengine.Engine) -> None:
    for name, here in (
        ("chat_template_kwargs", "template_kwargs"),
        ("lora_request", "adapter"),
        ("response_format", "structured"),
        ("max_token", "max_tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=rf"unknown parameter '{name}' \(did you mean {here}\?\)"):
            await engine.chat([{"role": "user", "content": "hi"}], **{name: {}})


async def test_chats_are_lists_of_mappings(engine: aengine.Engine) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}], "tools": ["x"]}, "tools"),
    ]
    for given, named in cases:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.chat(**given)
        assert caught.value.param == named


async def test_another_event_loop_gets_an_error_instead_of_waiting_forever(engine: aengine.Engine) -> None:
    async def elsewhere() -> None:
        with anyio.fail_after(5), pytest.raises(InvalidRequestError, match="event loop"):
            await engine.complete(PROMPT, max_tokens=2)

    await anyio.to_thread.run_sync(anyio.run, elsewhere)
    assert (await engine.complete(PROMPT, max_tokens=2)).finish_reason == "length"


@pytest.mark.alone
def test_a_long_prompt_of_ids_is_checked_in_a_few_milliseconds() -> None:
    """The event loop waits for it. Three passes over the ids take 15 to 55 ms, depending on the machine."""
    ids = [index % 1000 for index in range(300_000)]

    def check() -> None:
        check_token_ids(one_prompt(ids), 1000, "prompt")

    def one_pass() -> None:
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < 1000:
                raise AssertionError

    assert least_seconds(check) < 3 * least_seconds(one_pass)


def least_seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        begin = process_time()
        work()
        times.append(process_time() - begin)
    return min(times)


@pytest.mark.parametrize("ids", [[1, True], [1, 2.0], [1, "2"], [-1], [1000], [1, None], (5, 1000)])
def test_every_id_is_an_integer_of_the_vocabulary(ids: Sequence[Any]) -> None:
    check_token_ids([*range(1000)], 1000, "prompt")
    check_token_ids((), 1000, "prompt")
    with pytest.raises(InvalidRequestError, match="token ids are integers from 0 to 999"):
        check_token_ids(ids, 1000, "prompt")
