"""Answers of models with channels (harmony), at all chat endpoints. No answer is an error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import ServerConfig
from aengine.errors import InvalidRequestError
from aengine.http.anthropic.answer import AnswerPlan
from aengine.http.anthropic.events import MessageEventEncoder
from aengine.http.openai.bodies import ChatRequest
from aengine.http.openai.chat import tool_use
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.text.answer.harmony import CONTROL, HARMONY_THOUGHT
from aengine.text.answer.parser import AnswerFormat
from aengine.text.reading import AnswerReading
from aengine.text.tokens.output import UnstoppedBeginning
from aengine.types import Fragment, Usage
from tests.http.fake_engine import FakeEngine, FakeStream
from tests.http.serving import serving
from tests.text.cutting import read_fragments

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "strict": name == "g"}} for name in ("f", "g")]
TOKENS = {token: 7 + index for index, token in enumerate(CONTROL)}
GPT_OSS = AnswerFormat(
    harmony=True,
    thoughts=True,
    thought_markers=HARMONY_THOUGHT,
    markers=TOKENS,
    special_markers=frozenset(TOKENS),
)
SAID = [
    "<|channel|>analysis<|message|>",
    "I call",
    ".<|end|>",
    "<|start|>assistant<|channel|>comm",
    "entary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f",
    ' <|constrain|>json<|message|>{"a"',
    ": 1}<|call|>",
]


def saying(*words: str) -> FakeEngine:
    engine = FakeEngine()
    engine.words, engine.answer_format = words, GPT_OSS
    return engine


def reading(config: ServerConfig | None = None, structured: Structured | None = None, **fields: Any) -> AnswerReading:
    body = msgspec.convert({"messages": HELLO, "tools": TOOLS, **fields}, ChatRequest)
    return AnswerReading(config or ServerConfig(), GPT_OSS, tool_use(body).rules, structured=structured)


async def test_a_thought_a_preamble_and_a_call() -> None:
    async with serving(saying(*SAID)) as server:
        response = await server.post(PATH, messages=HELLO, tools=[TOOLS[0]])
        chunks = await server.post(PATH, messages=HELLO, tools=[TOOLS[0]], stream=True)
    (choice,) = response.json()["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "I call.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert choice["finish_reason"] == "tool_calls"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in chunks.text.splitlines() if line[6:7] == "{"]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "I call."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == '{"a": 1}'


async def test_control_tokens_are_written_and_ends_are_known() -> None:
    engine = saying(*SAID)
    async with serving(engine) as server:
        await server.post(PATH, messages=HELLO)
    (request,) = engine.submitted
    assert set(request.params.shown_special_ids) == set(TOKENS.values())
    assert set(request.params.stop_token_ids) == {TOKENS["<|call|>"], TOKENS["<|return|>"]}


def test_stop_strings_do_not_end_a_further_thought() -> None:
    unstopped = reading().engine_params(SamplingParams(stop=(".",)), False).unstopped
    assert unstopped is not None
    thoughts = "<|channel|>analysis<|message|>a.<|end|><|start|>assistant<|channel|>analysis<|message|>b.<|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>c."
    assert UnstoppedBeginning(*unstopped).feed(thoughts + answer) == (thoughts, answer)


def test_knobs_leave_calls_and_thoughts_in_the_text() -> None:
    config = ServerConfig(tool_format="off", reasoning="off")
    answer = read_fragments(reading(config).reader(False, lambda token_id: b""), *SAID)
    assert (answer.reasoning, answer.calls) == ("", ())
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    assert answer.content == f'I call.\nI look.\n{head}{{"a": 1}}'
    with pytest.raises(InvalidRequestError, match="tool_format"):
        reading(config, tool_choice="required")


def test_grammars() -> None:
    assert reading().calls_grammar(False) is not None  # one of the tools is strict
    assert "thought* calls" in str(reading(tool_choice="required").calls_grammar(False))
    form = Structured(json_object=True)
    structured = reading(structured=form).engine_params(SamplingParams(structured=form), False).structured
    assert structured is not None
    assert structured.thought == "possible"
    assert "to=functions.g" in str(structured.calls)


PIECES = [*CONTROL, *SAID, " to=functions.g", "analysis", "final", "assistant", '"', "{", "}", "\n", "é", "\\"]
words = st.lists(st.sampled_from(PIECES), max_size=14)


@given(texts=words, reason=st.sampled_from(["stop", "length"]))
def test_anthropics_endpoint_answers_for_any_text(texts: list[str], reason: Any) -> None:
    plan = AnswerPlan(id="msg_1", model="m", max_tokens=1000, shows_thoughts=True)
    encoder = MessageEventEncoder(plan, FakeStream("msg_1", 9, False), reading().reader(False, lambda token_id: b"x"))
    reported = encoder.opening()
    for text in texts:
        reported += encoder.event(Fragment(text, (1,)))
    usage = Usage(9, len(texts) + 1, 0)
    reported += encoder.event(Fragment("", (2,), None, reason, usage)) + encoder.closing(usage)
    events = [json.loads(line[6:]) for line in reported.decode().splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "<|message|>" * 3,
        "<|start|><|start|><|channel|><|message|><|call|>",
        "<|channel|>commentary to=functions.f<|message|>{<|end|>",
        "<|channel|>commentary to=functions.nobody<|message|>{}",
        "no header",
        "<|return|>",
    ],
)
async def test_nothing_that_a_model_writes_is_an_error(text: str, stream: bool) -> None:
    async with serving(saying(*text)) as server:
        chat = await server.post(PATH, messages=HELLO, tools=TOOLS, stream=stream)
        messages = await server.post("/v1/messages", messages=HELLO, max_tokens=100, stream=stream)
        responses = await server.post("/v1/responses", input="hello", stream=stream)
    assert [response.status_code for response in (chat, messages, responses)] == [200] * 3
    assert all('"error":{' not in response.text for response in (chat, messages, responses))
