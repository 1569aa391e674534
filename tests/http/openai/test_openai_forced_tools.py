"""Forced `tool_choice`: the answer is a call, whatever the model would have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.http.demo_server import demo_server

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"model": "aengine-demo", "max_tokens": 300}
SMALL_TALK: Any = [{"role": "user", "content": "hi"}]
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "stop": None,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name} | ({"parameters": schema} if schema else {})}
    for name, schema in SCHEMAS.items()
]


def check(call: Any, among: set[str]) -> None:
    """Check that the call is of one of these tools and its arguments follow the schema."""
    assert call.function.name in among
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"get_weather": {"city"}, "add": {"a", "b"}, "stop": set()}[call.function.name]
    assert all(0 <= value <= 99 if isinstance(value, int) else len(value) <= 16 for value in arguments.values())


@pytest.fixture(scope="module")
def random_url() -> Iterator[str]:
    """The same model with random weights."""
    with demo_server({"load_format": "dummy"}) as url:
        yield url


@pytest.mark.parametrize(
    ("server", "choice"),
    [
        ("demo_url", "get_weather"),
        *(pytest.param("demo_url", choice, marks=pytest.mark.slow) for choice in ("required", "add", "stop")),
        *(
            pytest.param("random_url", choice, marks=pytest.mark.slow)
            for choice in ("required", "add", "get_weather", "stop")
        ),
    ],
)
async def test_a_forced_call_replaces_the_models_answer(
    request: pytest.FixtureRequest, server: str, choice: str
) -> None:
    url = request.getfixturevalue(server)
    named = choice != "required"
    requested: dict[str, Any] = {
        **ASKED,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": choice}} if named else choice,
        "parallel_tool_calls": False,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=30) as client:
        chat = await client.chat.completions.create(**requested, messages=SMALL_TALK, n=4, seed=1)
        for each in chat.choices:
            assert each.finish_reason == "tool_calls"
            assert each.message.content is None
            (call,) = each.message.tool_calls or ()
            check(call, {choice} if named else set(SCHEMAS))
        async with client.chat.completions.stream(**requested, messages=SMALL_TALK, seed=1) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        (streamed_call,) = streamed.message.tool_calls or ()
        check(streamed_call, {choice} if named else set(SCHEMAS))


async def test_it_may_think_before_it_calls(demo_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        chat = await client.chat.completions.create(
            **ASKED,
            temperature=0,
            messages=[{"role": "user", "content": "What is 17 + 25?"}],
            tools=TOOLS,
            tool_choice="required",
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
    (choice,) = chat.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or ():
        check(call, set(SCHEMAS))


WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
ONLY_OSLO = {**SCHEMAS["get_weather"], "properties": {"city": {"enum": ["Oslo"]}}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("strict", "city"), [(None, "Paris"), pytest.param(False, "Paris", marks=pytest.mark.slow), (True, "Oslo")]
)
@pytest.mark.parametrize("thinking", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_strict_tools_schema_binds_calls_that_need_not_be(
    demo_url: str, strict: bool | None, city: str, thinking: bool
) -> None:
    function = {"name": "get_weather", "parameters": ONLY_OSLO, "strict": strict}
    requested: dict[str, Any] = {
        **ASKED,
        "temperature": 0,
        "tools": [{"type": "function", "function": function}],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}},
    }
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        calls = (await client.chat.completions.create(**requested, messages=WEATHER)).choices[
            0
        ].message.tool_calls or ()
        talk = (await client.chat.completions.create(**requested, messages=SMALL_TALK)).choices[0]
        plain = (await client.chat.completions.create(**ASKED, temperature=0, messages=SMALL_TALK)).choices[0]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": city}]
    assert talk.finish_reason == "stop"
    if not thinking:
        assert talk.message.content == plain.message.content


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "required"])
async def test_only_allowed_tools_are_called(demo_url: str, mode: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        choices = []
        for name in ("get_weather", "add"):
            allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
            chat = await client.chat.completions.create(
                **ASKED,
                temperature=0,
                messages=WEATHER,
                tools=TOOLS,
                tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
            )
            choices.append(chat.choices[0])
    (call,) = choices[0].message.tool_calls or ()
    check(call, {"get_weather"})
    (call,) = choices[1].message.tool_calls or ()  # the call is not forced, but must be of this tool
    assert call.type == "function"
    assert call.function.name == "add"
    if mode == "required":
        check(call, {"add"})


@pytest.mark.parametrize("thinking", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_an_answer_of_a_given_form_or_a_call(demo_url: str, thinking: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "add", "schema": SCHEMAS["add"]}}
    requested: dict[str, Any] = {**ASKED, "temperature": 0, "tools": TOOLS, "response_format": form}
    requested["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinking}}
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        whole = (await client.chat.completions.create(**requested, messages=WEATHER)).choices[0]
        async with client.chat.completions.stream(**requested, messages=WEATHER) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("requested", [{"tool_choice": "required"}, {}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("schema", [{"properties": {"a": {"pattern": "("}}}, {"properties": {"a": {"type": "strin"}}}])
async def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(
    demo_url: str, requested: dict[str, Any], schema: dict[str, Any]
) -> None:
    function = {"name": "f", "description": "// tools[9]", "parameters": schema, "strict": True}
    tools: Any = [*TOOLS, {"type": "function", "function": function}]
    async with openai.AsyncOpenAI(base_url=f"{demo_url}/v1", api_key="none", timeout=30) as client:
        with pytest.raises(openai.BadRequestError, match=r"tools\[3\].function.parameters: ") as refused:
            await client.chat.completions.create(**ASKED, messages=SMALL_TALK, tools=tools, **requested)
    assert refused.value.param == "tools[3].function.parameters"
