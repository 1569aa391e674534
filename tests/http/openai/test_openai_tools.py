"""Tools and thoughts of the demo model with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.http.demo_server import demo_server

pytestmark = pytest.mark.anyio

MODEL = "aengine-demo"
QUESTION = "What is the weather in Paris?"
RESULT = '{"temperature": 21, "sky": "sunny"}'
ANSWER = "It is 21 degrees and sunny in Paris."


def tool(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: Any = [
    tool("get_weather", "Get the current weather of a city."),
    tool("get_time", "Get the current time of a city."),
]
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 200}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


def without_ids(message: Any) -> dict[str, Any]:
    """Return a message as plain data, without random ids and the client's own fields such as `parsed`."""
    plain: dict[str, Any] = message.model_dump(include={"role", "content", "tool_calls", "reasoning_content"})
    for call in plain.get("tool_calls") or ():
        assert call.pop("id").startswith("call_")
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return plain


async def test_a_question_a_call_its_result_and_the_answer(demo_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        first = (await client.chat.completions.create(**ASKED, messages=messages, tools=TOOLS)).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        assert first.message.tool_calls is not None
        (call,) = first.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        second = await client.chat.completions.create(**ASKED, messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == ANSWER
        assert second.choices[0].finish_reason == "stop"
        assert second.choices[0].message.tool_calls is None
        # The call is rendered as the model wrote it, so everything before the result is in the prefix cache.
        usage = second.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0) < 48


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        pytest.param("What is the weather in Rome and in Oslo?", marks=pytest.mark.slow),
        pytest.param("What is the capital of France?", marks=pytest.mark.slow),
    ],
)
async def test_streamed_pieces_make_the_same_message(demo_url: str, question: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        requested: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": question}], "tools": TOOLS}
        whole = await client.chat.completions.create(**requested)
        async with client.chat.completions.stream(**requested) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
            streamed = await stream.get_final_completion()
    assert without_ids(streamed.choices[0].message) == without_ids(whole.choices[0].message)
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    calls = whole.choices[0].message.tool_calls or []
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.id and piece.function] == [
        call.function.name for call in calls if call.type == "function"
    ]
    assert len(pieces) >= 3 * len(calls)  # they are streamed while the model writes


@pytest.mark.slow
def test_the_client_without_async(demo_url: str) -> None:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        messages: Any = [{"role": "user", "content": "What is the weather in Rome and in Oslo?"}]
        stream = client.chat.completions.create(**ASKED, messages=messages, tools=TOOLS, stream=True)
        arguments: dict[int, str] = {}
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        assert [json.loads(text) for text in arguments.values()] == [{"city": "Rome"}, {"city": "Oslo"}]
        one = client.chat.completions.create(**ASKED, messages=messages, tools=TOOLS, parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls or ()) == 1


async def test_a_thought_and_the_answer(demo_url: str) -> None:
    requested: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        whole = (await client.chat.completions.create(**requested, extra_body=THINKING)).choices[0].message
        thought, content = "", ""
        async for chunk in await client.chat.completions.create(**requested, extra_body=THINKING, stream=True):
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        plain = (await client.chat.completions.create(**requested, extra_body=off)).choices[0].message
    assert (thought, content) == (getattr(whole, "reasoning_content", None), whole.content)
    assert thought.startswith("Ones:")
    assert content == plain.content == "17 + 25 = 42."
    assert not hasattr(plain, "reasoning_content")


@pytest.mark.slow
async def test_a_thought_and_an_answer_of_a_given_form(demo_url: str) -> None:
    requested: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    form: dict[str, Any] = {
        "structured_outputs": {"regex": r"[0-9]+ \+ [0-9]+ = [0-9]{2}!"}
    }  # without the regex it would end with a dot
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        whole = (await client.chat.completions.create(**requested, extra_body=THINKING | form)).choices[0]
        thought, content = "", ""
        async for chunk in await client.chat.completions.create(**requested, extra_body=THINKING | form, stream=True):
            delta = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
        plain = (await client.chat.completions.create(**requested, extra_body=form)).choices[0]
    assert (thought, content) == (getattr(whole.message, "reasoning_content", None), whole.message.content)
    assert thought.startswith("Ones:")
    assert content == plain.message.content == "17 + 25 = 42!"
    assert (whole.finish_reason, plain.finish_reason) == ("stop", "stop")
    assert not hasattr(plain.message, "reasoning_content")


async def test_thoughts_stay_in_the_text_if_the_knob_is_off() -> None:
    with demo_server(reasoning="off") as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=30) as client:
            chat = await client.chat.completions.create(
                **ASKED, messages=[{"role": "user", "content": "What is 17 + 25?"}], extra_body=THINKING
            )
    content = chat.choices[0].message.content
    assert content is not None
    assert content.startswith("<think>\nOnes:")
    assert content.endswith("\n</think>\n\n17 + 25 = 42.")
