"""The demo model with OpenAI's client: `responses.create`, `stream` and `parse`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from tests.http.demo_server import demo_server

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"model": "aengine-demo", "temperature": 0, "max_output_tokens": 200}
QUESTION = "What is the weather in Paris?"
RESULT = '{"temperature": 21, "sky": "sunny"}'
ANSWER = "It is 21 degrees and sunny in Paris."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, description: str) -> Any:
    return {"type": "function", "name": name, "description": description, "parameters": SCHEMA, "strict": False}


TOOLS = [
    function("get_weather", "Get the current weather of a city."),
    function("get_time", "Get the current time of a city."),
]


class Sum(BaseModel):
    left: int
    right: int


@pytest.fixture
def client(demo_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_a_question_a_call_its_result_and_the_answer(client: openai.OpenAI) -> None:
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(**ASKED, input=conversation, tools=TOOLS)
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    conversation += [call, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    second = client.responses.create(**ASKED, input=conversation, tools=TOOLS)
    assert second.output_text == ANSWER
    assert second.status == "completed"
    usage = second.usage
    assert usage is not None
    # The call is rendered as the model wrote it, so everything before the result is in the prefix cache.
    assert usage.input_tokens - usage.input_tokens_details.cached_tokens < 48


def test_the_count_of_input_tokens_equals_the_usage(client: openai.OpenAI) -> None:
    requested: dict[str, Any] = {
        "input": [{"role": "user", "content": QUESTION}],
        "instructions": "Answer briefly.",
        "tools": TOOLS,
    }
    counted = client.responses.input_tokens.count(model="aengine-demo", **requested)
    assert counted.object == "response.input_tokens"
    usage = client.responses.create(**ASKED, **requested).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens
    fewer = client.responses.input_tokens.count(model="aengine-demo", input=QUESTION)
    assert 0 < fewer.input_tokens < counted.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="another", input=QUESTION)
    for wrong in {"top_k": -2}, {"temperature": -1}:
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.responses.input_tokens.count(model="aengine-demo", input=QUESTION, extra_body=wrong)


@pytest.mark.slow
def test_a_stream_accumulates_to_the_same_response(client: openai.OpenAI) -> None:
    for question in (QUESTION, "What is the capital of France?"):
        whole = client.responses.create(**ASKED, input=question, tools=TOOLS)
        with client.responses.stream(**ASKED, input=question, tools=TOOLS) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        deltas = {"response.output_text.delta", "response.function_call_arguments.delta"}
        assert sum(kind in deltas for kind in kinds) >= 2  # several tokens of a step come in one


async def test_the_client_with_async(demo_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        text = ""
        async for event in await client.responses.create(**ASKED, input="What is 17 + 25?", stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
    assert text == "17 + 25 = 42."


def test_an_answer_of_a_models_form_is_parsed(client: openai.OpenAI) -> None:
    requested = {**ASKED, "max_output_tokens": 300}
    response = client.responses.parse(**requested, input="What is 17 + 25?", text_format=Sum)
    assert isinstance(response.output_parsed, Sum)
    with client.responses.stream(**requested, input="What is 17 + 25?", text_format=Sum) as stream:
        parsed = [event.parsed for event in stream if event.type == "response.output_text.done"]
        final = stream.get_final_response()
    assert parsed == [final.output_parsed] == [response.output_parsed]
    tool = openai.pydantic_function_tool(Sum, name="add")
    called = client.responses.parse(
        **requested, input="hi", tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Sum)


@pytest.mark.parametrize("summary", [None, pytest.param("auto", marks=pytest.mark.slow)])
def test_a_thought_and_its_tokens(client: openai.OpenAI, summary: Any) -> None:
    reasoning: Any = {"effort": "low", "summary": summary}
    response = client.responses.create(**ASKED, input="What is 17 + 25?", reasoning=reasoning)
    thought, _ = response.output
    assert isinstance(thought, ResponseReasoningItem)
    text = (thought.content if summary is None else thought.summary) or []
    assert text[0].text.startswith("Ones:")
    assert response.output_text == "17 + 25 = 42."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 10
    requested: Any = [
        {"role": "user", "content": "What is 17 + 25?"},
        *response.output,
        {"role": "user", "content": "hi"},
    ]
    assert client.responses.create(**ASKED, input=requested).output_text
    none = client.responses.create(**ASKED, input="What is 17 + 25?", reasoning={"effort": "none"})
    assert [item.type for item in none.output] == ["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}])
def test_a_call_that_must_be(client: openai.OpenAI, choice: Any) -> None:
    requested: Any = {**ASKED, "input": "hi", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    (call,) = client.responses.create(**requested).output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "get_time" or choice == "required"
    assert set(json.loads(call.arguments)) == {"city"}


@pytest.mark.slow
def test_a_custom_tools_input_matches_its_regex(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "custom",
        "name": "pick",
        "format": {"type": "grammar", "syntax": "regex", "definition": '[a-c]{2}"\\d{3}|x'},
    }
    requested: Any = {**ASKED, "temperature": 1, "input": "hi", "tools": [tool]}
    for seed in range(4):
        for choice in ("required", {"type": "custom", "name": "pick"}):
            more: Any = {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"seed": seed}}
            (call,) = client.responses.create(**requested, **more).output
            assert isinstance(call, ResponseCustomToolCall)
            assert re.fullmatch('[a-c]{2}"[0-9]{3}|x', call.input)


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **ASKED, input="What is 17 + 25?", include=["message.output_text.logprobs"], top_logprobs=2
    )
    message = response.output[0]
    assert message.type == "message"
    content = message.content[0]
    assert content.type == "output_text"
    assert "".join(one.token for one in content.logprobs or ()).startswith(content.text)
    assert all(len(one.top_logprobs) == 2 for one in content.logprobs or ())


def test_refusals_have_the_clients_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="aengine-demo", input="a", tools=[{"type": "image_generation"}])
    assert bad.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError, match="kept_responses"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="kept_responses"):
        client.responses.create(model="aengine-demo", input="a", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="aengine-demo", input="a " * 9000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")


def test_kept_responses() -> None:
    with (
        demo_server(kept_responses=4) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        first = client.responses.create(**ASKED, input=QUESTION, tools=TOOLS)
        (call,) = first.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        second = client.responses.create(**ASKED, input=[result], tools=TOOLS, previous_response_id=first.id)
        assert second.output_text == ANSWER
        assert client.responses.retrieve(first.id).output == first.output
        listed = client.responses.input_items.list(second.id, limit=2, order="asc")
        assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
