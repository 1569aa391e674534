"""Tools that `/v1/chat/completions` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.text.answer.parser import AnswerFormat
from tests.http.openai.tools import CALL, HELLO, PATH, TOOLS, named, saying
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [named("f"), named("g"), {"type": "function"}]}, "tools[2].function"),
    ({"tools": [named("f"), {"type": "function", "function": {}}]}, "tools[1].function.name"),
    ({"tools": [named("f"), named("g"), named("a b")]}, "tools[2].function.name"),
    ({"tools": [named("f\n")]}, "tools[0].function.name"),
    ({"tools": [named("")]}, "tools[0].function.name"),
    ({"tools": [named("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    ({"tools": [named(f"f{index}") for index in range(129)]}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [named("f"), named("g"), named("f", strict=True)]}, "tools[2].function.name"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": named("h")}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [named("f"), named("h")]},
            },
        },
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [named("f")]}},
        },
        "tool_choice.allowed_tools.mode",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.type"),
    ({"tools": [named("f", strict="yes")]}, "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a|>"}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
]


async def test_bad_tools_are_refused_by_name() -> None:
    async with serving(saying(*CALL)) as server:
        for fields, param in REFUSED:
            response = await server.post(PATH, **{"messages": HELLO, **fields})
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param, (fields, error)
            assert param.split(".")[0] in error["message"], error
        assert (await server.post(PATH, messages=HELLO, tools=[named("x" * 64)])).status_code == 200


async def test_parts_that_are_no_text_are_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    content = [{"type": "text", "text": "see"}, image]
    async with serving() as server:
        refused = await server.post(PATH, messages=[*HELLO, {"role": "user", "content": content}])
        empty = await server.post(PATH, messages=[{"role": "user", "content": [{"type": "text"}]}])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].content[1].type"
    assert "the model takes no images: it reads text only; send text alone" in refused.json()["error"]["message"]
    assert empty.json()["error"]["param"] == "messages[0].content[0].text"


async def test_a_call_of_an_unknown_format_cannot_be_forced() -> None:
    async with serving(saying(*CALL, form=AnswerFormat())) as server:
        refused = await server.post(PATH, messages=HELLO, tools=TOOLS, tool_choice="required")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"
    assert "tool_format" in refused.json()["error"]["message"]


async def test_a_call_of_tools_that_the_model_cannot_see_cannot_be_forced() -> None:
    async with serving(saying(*CALL, form=AnswerFormat(sees_tools=False))) as server:
        refused = await server.post(PATH, messages=HELLO, tools=TOOLS, tool_choice="required")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"
    assert "has no place for tools" in refused.json()["error"]["message"]
