"""Tools, thoughts and structured output of the demo model with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from pydantic import BaseModel

pytestmark = pytest.mark.anyio

MODEL = "aengine-demo"
QUESTION = "What is the weather in Paris?"
BOTH = "What is the weather in Rome and in Oslo?"
RESULT = '{"temperature": 21, "sky": "sunny"}'
ANSWER = "It is 21 degrees and sunny in Paris."
SUM = "What is 17 + 25?"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}


def tool(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS: Any = [
    tool("get_weather", "Get the current weather of a city."),
    tool("get_time", "Get the current time of a city."),
]


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def result(call: Any, content: Any = RESULT, **more: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": call.id, "content": content, **more}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def without_ids(message: Any) -> list[dict[str, Any]]:
    """Return the blocks as plain data, without random ids and the client's own `parsed_output`."""
    blocks = [block.to_dict() for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "parsed_output")} for block in blocks]


@pytest.fixture
async def client(demo_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=demo_url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


async def test_a_question_a_call_its_result_and_the_answer(client: anthropic.AsyncAnthropic) -> None:
    first = await client.messages.create(**ASKED, messages=[user(QUESTION)], tools=TOOLS)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    history = [user(QUESTION), first.to_param(), user([result(call, [{"type": "text", "text": RESULT}])])]
    second = await client.messages.create(**ASKED, messages=history, tools=TOOLS)
    assert (text_of(second), second.stop_reason) == (ANSWER, "end_turn")
    # The call is rendered as the model wrote it, so everything before the result is in the prefix cache.
    assert second.usage.input_tokens < 48
    assert (second.usage.cache_read_input_tokens or 0) >= first.usage.output_tokens


@pytest.mark.slow
async def test_several_calls_at_once_and_their_results(client: anthropic.AsyncAnthropic) -> None:
    both = await client.messages.create(**ASKED, messages=[user(BOTH)], tools=TOOLS)
    calls = [block for block in both.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert calls[0].id != calls[1].id
    history = [user(BOTH), both.to_param(), user([result(calls[0]), result(calls[1], "no such city", is_error=True)])]
    assert text_of(await client.messages.create(**ASKED, messages=history, tools=TOOLS))
    single: Any = {"type": "auto", "disable_parallel_tool_use": True}
    one = await client.messages.create(**ASKED, messages=[user(BOTH)], tools=TOOLS, tool_choice=single)
    assert len(one.content) == 1


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "get_time"}),
        ({"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}, {"get_time"}),
    ],
)
async def test_a_tool_that_must_be_called(client: anthropic.AsyncAnthropic, choice: Any, names: set[str]) -> None:
    message = await client.messages.create(**ASKED, messages=[user("hi")], tools=TOOLS, tool_choice=choice)
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name in names
    assert isinstance(call.input["city"], str)
    assert message.stop_reason == "tool_use"


async def test_tools_that_are_not_to_be_called(client: anthropic.AsyncAnthropic) -> None:
    none: Any = {"type": "none"}
    message = await client.messages.create(**ASKED, messages=[user(QUESTION)], tools=TOOLS, tool_choice=none)
    assert {block.type for block in message.content} == {"text"}
    counted = await client.messages.count_tokens(model=MODEL, messages=[user(QUESTION)], tools=TOOLS, tool_choice=none)
    assert counted == await client.messages.count_tokens(model=MODEL, messages=[user(QUESTION)])


@pytest.mark.parametrize(
    "question",
    [BOTH, *(pytest.param(text, marks=pytest.mark.slow) for text in (QUESTION, "What is the capital of France?", SUM))],
)
@pytest.mark.parametrize(
    "thinking", [{"type": "enabled", "budget_tokens": 1024}, pytest.param({"type": "disabled"}, marks=pytest.mark.slow)]
)
async def test_streamed_pieces_make_the_same_message(
    client: anthropic.AsyncAnthropic, question: str, thinking: Any
) -> None:
    requested = ASKED | {"messages": [user(question)], "tools": TOOLS, "thinking": thinking}
    whole = await client.messages.create(**requested)
    async with client.messages.stream(**requested) as stream:
        events = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert without_ids(final) == without_ids(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    calls = sum(block.type == "tool_use" for block in whole.content)
    assert events.count("input_json") >= 2 * calls  # they are streamed while the model writes
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)


@pytest.mark.parametrize(
    "thinking",
    [{"type": "adaptive"}, pytest.param({"type": "enabled", "budget_tokens": 1024}, marks=pytest.mark.slow)],
)
async def test_a_thought_comes_signed_and_may_come_back(client: anthropic.AsyncAnthropic, thinking: Any) -> None:
    requested: Any = ASKED | {"thinking": thinking}
    message = await client.messages.create(**requested, messages=[user(SUM)])
    thought, answer = message.content
    assert thought.type == "thinking"
    assert thought.thinking.startswith("Ones:")
    assert thought.signature
    assert answer.type == "text"
    assert answer.text == "17 + 25 = 42."
    details = message.usage.output_tokens_details
    assert details is not None
    assert 0 < details.thinking_tokens < message.usage.output_tokens
    again = await client.messages.create(**requested, messages=[user(SUM), message.to_param(), user(SUM)])
    assert text_of(again)


@pytest.mark.slow
async def test_a_thought_that_stays_away(client: anthropic.AsyncAnthropic) -> None:
    omitted: Any = {"type": "adaptive", "display": "omitted"}
    requested = ASKED | {"messages": [user(SUM)], "thinking": omitted}
    whole = await client.messages.create(**requested)
    async with client.messages.stream(**requested) as stream:
        final = await stream.get_final_message()
    assert without_ids(whole) == without_ids(final)
    assert whole.content[0].type == "thinking"
    assert (whole.content[0].thinking, bool(whole.content[0].signature)) == ("", True)
    for quiet in ("disabled", "between_tools"):
        plain = await client.messages.create(**ASKED, messages=[user(SUM)], thinking={"type": quiet})  # type: ignore[arg-type]
        assert without_ids(plain) == [{"type": "text", "text": "17 + 25 = 42."}]


async def test_the_answer_has_the_stop_sequence_that_ended_it(client: anthropic.AsyncAnthropic) -> None:
    requested = ASKED | {"messages": [user(SUM)], "stop_sequences": ["never", " = "]}
    whole = await client.messages.create(**requested)
    async with client.messages.stream(**requested) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        assert (text_of(message), message.stop_reason, message.stop_sequence) == ("17 + 25", "stop_sequence", " = ")


async def test_a_last_message_of_the_assistant_is_continued(client: anthropic.AsyncAnthropic) -> None:
    for content in ("17 + 25 =", [{"type": "text", "text": "17 + 25 ="}]):
        prefill: Any = {"role": "assistant", "content": content}
        message = await client.messages.create(**ASKED, messages=[user(SUM), prefill])
        assert text_of(message) == " 42."
    ends_with_a_call: Any = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "get_time", "input": {"city": "Oslo"}}],
    }
    with pytest.raises(anthropic.BadRequestError, match=r"messages.*the last message must end with text"):
        await client.messages.create(**ASKED, messages=[user(SUM), ends_with_a_call], tools=TOOLS)


async def test_the_end_of_the_context_is_no_mistake(client: anthropic.AsyncAnthropic) -> None:
    """Claude Code asks for more tokens than a small context has."""
    message = await client.messages.create(**ASKED | {"max_tokens": 10_000_000}, messages=[user(SUM)])
    assert message.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* maximum context length"):
        await client.messages.create(**ASKED, messages=[user("a b c " * 50_000)])
    # Counting still works:
    counted = await client.messages.count_tokens(model=MODEL, messages=[user("a b c " * 5_000)])
    assert counted.input_tokens >= 15_000


async def test_a_prompt_that_is_only_to_be_cached(client: anthropic.AsyncAnthropic) -> None:
    messages = [user("Remember this, word for word, and nothing else but this: " + "one two three four five " * 9)]
    first = await client.messages.create(**ASKED | {"max_tokens": 0}, messages=messages)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    second = await client.messages.create(**ASKED, messages=messages)
    assert (second.usage.cache_read_input_tokens or 0) > 32


SYSTEM: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
HISTORY: Any = [user("hi"), {"role": "assistant", "content": "hello"}, {"role": "system", "content": "x"}, user(SUM)]


@pytest.mark.parametrize(
    "requested",
    [
        {"messages": [user(SUM)]},
        {"messages": [user(SUM)], "system": SYSTEM},
        {"messages": [user(QUESTION)], "tools": TOOLS},
        {"messages": [user(QUESTION)], "tools": TOOLS, "tool_choice": {"type": "none"}},
        {"messages": [user(SUM)], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [user(SUM), {"role": "assistant", "content": "17 +"}]},
        {"messages": HISTORY, "system": "Be brief."},
        {"messages": [user(SUM)], "output_config": {"effort": "low"}},
    ],
)
async def test_the_count_is_that_of_the_prompt(client: anthropic.AsyncAnthropic, requested: Any) -> None:
    counted = await client.messages.count_tokens(model=MODEL, **requested)
    usage = (await client.messages.create(**ASKED | {"max_tokens": 1}, **requested)).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


class Plan(BaseModel):
    title: Literal["walk", "run"]
    steps: list[Literal["first", "second"]]
    note: bool | None


@pytest.mark.slow
async def test_parse(client: anthropic.AsyncAnthropic) -> None:
    requested: Any = {"model": MODEL, "max_tokens": 400, "messages": [user("Make a plan.")], "output_format": Plan}
    parsed = await client.messages.parse(**requested)
    assert isinstance(parsed.parsed_output, Plan)
    async with client.messages.stream(**requested) as stream:
        assert isinstance((await stream.get_final_message()).parsed_output, Plan)
    assert (
        await client.messages.count_tokens(**{name: requested[name] for name in requested if name != "max_tokens"})
    ) == (await client.messages.count_tokens(model=MODEL, messages=requested["messages"]))


async def test_forms_as_older_clients_ask_for_them_and_forms_that_cannot_be(client: anthropic.AsyncAnthropic) -> None:
    schema = {"properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": {"type": "object", **schema}}
    requested: Any = {"model": MODEL, "max_tokens": 100, "messages": [user("hi")]}
    message = await client.messages.create(**requested, extra_body={"output_format": form})
    assert json.loads(text_of(message)) == {"a": 7}
    bad: Any = {"format": {"type": "json_schema", "schema": {"type": "poem"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        await client.messages.create(**requested, output_config=bad)
    strict: Any = [{**TOOLS[0], "input_schema": {"type": "object", "properties": {"a": {"type": "poem"}}}}]
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema"):
        await client.messages.create(**requested, tools=strict, tool_choice={"type": "any"})


async def test_the_tool_runner(client: anthropic.AsyncAnthropic) -> None:
    requested: list[str] = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        requested.append(city)
        return RESULT

    runner = client.beta.messages.tool_runner(**ASKED, tools=[get_weather], messages=[user(QUESTION)], max_iterations=4)
    assert text_of(await runner.until_done()) == ANSWER
    assert requested == ["Paris"]


def test_the_tool_runner_without_async_and_streaming(demo_url: str) -> None:
    requested: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        requested.append(city)
        return RESULT

    with anthropic.Anthropic(base_url=demo_url, api_key="none", max_retries=0, timeout=30) as client:
        streams = client.beta.messages.tool_runner(
            **ASKED, tools=[get_weather], messages=[user(QUESTION)], max_iterations=4, stream=True
        )
        *_, last = [stream.get_final_message() for stream in streams]
    assert text_of(last) == ANSWER
    assert requested == ["Paris"]
