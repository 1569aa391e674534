"""Fields of `POST /v1/responses`: which are refused, by name, and which are taken and ask for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.responses.creating import PATCH, PATH, F, refusal, saying
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "length >= 1"),
        ({"input": 3}, "input", "Expected"),
        ({"input": [{"content": "a"}]}, "input[0].role", "a message must have it"),
        ({"input": [{"role": "user"}]}, "input[0].content", "'message' must have it"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "text only"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "text only"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "must have"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call' are not known"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "must have"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "must have"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "must have"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "aengine-thought:%"}]},
            "input[0].encrypted_content",
            "differs",
        ),
        (
            {"tools": [{"type": "image_generation"}]},
            "tools[0].type",
            "'image_generation' is a tool that OpenAI's servers",
        ),
        (
            {"tools": [F, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "function or custom",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "'mcp'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "must have"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "must have"),
        ({"tools": [F, F]}, "tools[1].name", "another tool"),
        ({"tools": [{**F, "parameters": {"type": "array"}}]}, "tools[0].parameters.type", "object"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}]},
            "tools[0].format.syntax",
            "Lark",
        ),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "regex"}}]},
            "tools[0].format.definition",
            "must have",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "not among"),
        ({"tools": [F], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type", "a function tool"),
        ({"tools": [F], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "function or custom"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools", "must have"),
        (
            {
                "tools": [F],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice.tools[0].name",
            "not among",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "must have"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "chat template"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "reasoning.effort"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": ["everything"]}, "include[0]", "Invalid enum value"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "<= 512"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "<= 16"),
        ({"background": True}, "background", "send stream"),
        ({"conversation": "conv_1"}, "conversation", "send their items"),
        ({"prompt": {"id": "p"}}, "prompt", "templates are not kept"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "it is called input here"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text with format"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning with effort"),
        ({"n": 2}, "n", "a response has one answer"),
        ({"echo": True}, "echo", "has no such field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "kept_responses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusals(body: dict[str, Any], param: str, words: str) -> None:
    async with serving(saying("a")) as server:
        error = await refusal(server, **body)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert words in error["message"]
        assert server.engine.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"background": False, "conversation": None, "n": 1, "response_format": {"type": "text"}, "logprobs": False},
        {"store": True, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3},
        {"include": ["web_search_call.action.sources", "reasoning.encrypted_content"], "truncation": "disabled"},
        {"text": {"verbosity": "low"}, "truncation": "auto", "verbosity": "high", "prediction": {"type": "content"}},
        {"text": {"verbosity": "medium"}, "reasoning": {"context": "auto"}, "top_logprobs": 0, "moderation": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}, "prompt_cache_retention": "24h"},
    ],
)
async def test_fields_without_effect_are_accepted(body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        answer = await server.post(PATH, input="one", **body)
        assert answer.status_code == 200, answer.text
    assert caplog.text == ""


async def test_openais_own_client_has_no_field_that_is_merely_unknown(caplog: pytest.LogCaptureFixture) -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    async with serving() as server:
        for name in ResponseCreateParamsBase.__annotations__:
            await server.post(PATH, **{"input": "one", name: "x"})
    assert caplog.text == ""
