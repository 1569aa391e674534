"""Logprobs of `POST /v1/responses`: each message has those of its own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.text.answer.parser import AnswerFormat
from tests.http.responses.creating import CALL, PATH, F, refusal, respond, saying
from tests.http.responses.streams import parse
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


async def test_logprobs_are_those_of_the_message() -> None:
    words = ["<think>", "a", "</think>", "\n\n", "Par", "is"]
    ids = {100 + place: word.encode() for place, word in enumerate(words)}
    engine = saying(*words)
    engine.tokenizer.token_bytes = ids.__getitem__  # type: ignore[method-assign]
    async with serving(engine) as server:
        response = await respond(server, include=["message.output_text.logprobs"], top_logprobs=1)
        none = await respond(server)
    logprobs = response["output"][1]["content"][0]["logprobs"]
    assert [one["token"] for one in logprobs] == ["\n\n", "Par", "is"]
    assert logprobs[0]["top_logprobs"] == [{"token": "other0", "logprob": -2.0, "bytes": list(b"other0")}]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert none["output"][1]["content"][0]["logprobs"] == []


async def test_logprobs_of_calls_are_none_of_the_messages() -> None:
    more = {"include": ["message.output_text.logprobs"], "tools": [F]}
    for words in (["I ", "look.\n", *CALL], CALL):
        engine = saying(*words, form=AnswerFormat(calls="hermes"))
        async with serving(engine) as server:
            output = (await respond(server, **more))["output"]
        reported = [one["token"] for item in output[:-1] for one in item["content"][0]["logprobs"]]
        assert reported == words[: -len(CALL)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])  # in a fragment
async def test_each_message_has_the_logprobs_of_its_own_tokens(stream: bool, tokens: int) -> None:
    words = ["I ", "look.", *CALL, "\n", "Do", "ne.", *CALL, "So", " it", " is."]
    engine = saying(*words, form=AnswerFormat(calls="hermes"))
    engine.together = tokens
    more = {"include": ["message.output_text.logprobs"], "tools": [F]}
    async with serving(engine) as server:
        if stream:
            *_, last = parse((await server.post(PATH, input="one", stream=True, **more)).text)
            output = last["response"]["output"]
        else:
            output = (await respond(server, **more))["output"]
    assert [item["type"] for item in output] == ["message", "function_call"] * 2 + ["message"]
    parts = [item["content"][0] for item in output[::2]]
    reported = [[one["token"] for one in part["logprobs"]] for part in parts]
    assert reported == [["I ", "look."], ["Do", "ne."], ["So", " it", " is."]]


async def test_logprobs_are_bounded() -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 9}
    async with serving(max_answer_candidates=30) as server:
        for stream in (False, True):
            assert (await server.post(PATH, input="one", stream=stream, max_output_tokens=3, **more)).status_code == 200
            error = await refusal(server, stream=stream, max_output_tokens=4, **more)
            assert error["param"] == "top_logprobs"
            assert "max_answer_candidates" in error["message"]
