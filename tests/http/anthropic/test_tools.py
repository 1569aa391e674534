"""`tools` and `tool_choice`: offered tools and refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aengine.errors import InvalidRequestError
from aengine.http.anthropic.bodies import CountTokensRequest
from aengine.http.anthropic.tools import tool_use_of
from aengine.http.fields.tools import ToolUse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA, **more}


def used(**fields: Any) -> ToolUse:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool("one"), tool("two")], **fields}
    return tool_use_of(msgspec.convert(body, CountTokensRequest))


@pytest.mark.parametrize(
    ("choice", "offered", "names", "forced", "parallel"),
    [
        (None, 2, {"one", "two"}, False, True),
        ({"type": "auto"}, 2, {"one", "two"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, 2, {"one", "two"}, False, False),
        ({"type": "any"}, 2, {"one", "two"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, 2, {"one", "two"}, True, False),
        ({"type": "tool", "name": "two"}, 2, {"two"}, True, True),
        ({"type": "tool", "name": "two", "disable_parallel_tool_use": True}, 2, {"two"}, True, False),
        ({"type": "none"}, 0, set(), False, True),
    ],
)
def test_callable_tools(choice: Any, offered: int, names: set[str], forced: bool, parallel: bool) -> None:
    tools = used(tool_choice=choice)
    assert (len(tools.offered), tools.names, tools.forced, tools.parallel) == (offered, names, forced, parallel)


def test_a_tool_is_a_function_of_openais_to_the_template() -> None:
    (offered,) = used(tools=[tool("one", description="Does.", strict=True, type="custom")]).offered
    function = offered.function
    assert (function.name, function.description, function.parameters, function.strict) == ("one", "Does.", SCHEMA, True)


def test_fields_without_effect_are_accepted() -> None:
    more = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "input_examples": [{"city": "Rome"}]}
    assert used(tools=[tool("one", defer_loading=False, allowed_callers=["direct"], **more)]).names == {"one"}


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    assert used(tools=None).offered == used(tools=[]).offered == []


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "'web_search_20250305'"),
        ({"tools": [tool("a"), {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type", "of your own"),
        (
            {"tools": [{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}]},
            "tools[0].type",
            "text_e",
        ),
        ({"tools": [{"type": "computer_toolset_20260801"}]}, "tools[0].type", "'computer_toolset_20260801'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "must be given"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", "must be given"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].name", "another tool of the name 'a'"),
        ({"tools": [tool("a") | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema.type", "'array'"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "tool", "name": "three"}}, "tool_choice.name", "'three' is not among the tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "must be given"),
    ],
)
def test_refusals(fields: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        used(**fields)
    assert refused.value.param == path
    assert words in str(refused.value)
