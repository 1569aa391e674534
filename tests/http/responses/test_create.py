"""`POST /v1/responses`: the prompt, the whole answer, and the same answer as events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.responses import Response

from aengine.errors import EngineFailedError, InvalidRequestError, QueueFullError
from aengine.text.answer.parser import AnswerFormat
from aengine.types import Fragment, Usage
from tests.http.fake_engine import WORDS, FakeEngine
from tests.http.responses.streams import check_order, parse, without_ids
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
QWEN = AnswerFormat(calls="hermes", thoughts=True)
CALL = ["<tool_call>", '\n{"name": "f", ', '"arguments": {"a', '": 1}', "}\n</tool", "_call>"]
ALL = ["<think>", "\nI call.", "\n</think>", "\n\nI ", "look.\n", *CALL, "\n", *CALL]
F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Changes a file."}


def saying(*words: str, form: AnswerFormat = QWEN) -> FakeEngine:
    engine = FakeEngine()
    engine.words, engine.answer_format = words, form
    return engine


async def respond(server: Server, **body: Any) -> dict[str, Any]:
    """Return a whole response, and check that a stream's last event has the same."""
    body = {"input": "one two", **body}
    answer = await server.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    Response.model_validate(response, strict=True)
    streamed = await server.post(PATH, **body, stream=True)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert without_ids(check_order(parse(streamed.text))) == without_ids(response)
    return response


async def refusal(server: Server, **body: Any) -> dict[str, Any]:
    answer = await server.post(PATH, **{"input": "one", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_a_whole_response() -> None:
    async with serving() as server:
        answer = (await server.post(PATH, input="one two", max_output_tokens=2, metadata={"a": "b"}, user="u")).json()
    (item,) = answer["output"]
    assert answer["id"].startswith("resp_")
    assert item["id"].startswith("msg_")
    assert answer | {"id": "", "created_at": 0, "output": []} == {
        "id": "",
        "object": "response",
        "created_at": 0,
        "completed_at": None,
        "status": "incomplete",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [],
        "usage": {
            "input_tokens": 2,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 4,
        },
        "background": False,
        "instructions": None,
        "max_output_tokens": 2,
        "max_tool_calls": None,
        "model": "fake",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": "u",
        "metadata": {"a": "b"},
    }
    text = {"type": "output_text", "text": "Paris, said", "annotations": [], "logprobs": []}
    assert item == {**item, "type": "message", "status": "incomplete", "role": "assistant", "content": [text]}


async def test_a_thought_a_message_and_calls() -> None:
    async with serving(saying(*ALL)) as server:
        response = await respond(server, tools=[F])
    thought, message, first, second = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I call."}]
    assert thought["summary"] == []
    assert "encrypted_content" not in thought
    assert message["content"][0]["text"] == "I look."
    for call in (first, second):
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
        assert call["call_id"].startswith("call_")
        assert call["id"].startswith("fc_")
    assert {item["status"] for item in response["output"]} == {response["status"]} == {"completed"}
    assert response["tools"] == [F]


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
async def test_a_thought_stands_in_the_summary_where_that_is_asked_for(field: str) -> None:
    async with serving(saying(*ALL)) as server:
        response = await respond(server, reasoning={field: "concise"}, include=["reasoning.encrypted_content"])
    thought = response["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "I call."}]
    assert "content" not in thought
    assert response["reasoning"] == {"effort": None, "summary": "concise"}


async def test_what_came_back_goes_to_the_model_as_it_was() -> None:
    """In every form in which clients keep a thought: its content, encrypted content, or summary."""
    engine = saying(*ALL)
    said = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "I call.",
    }
    async with serving(engine) as server:
        for more, lost in (
            ({}, ()),
            ({"include": ["reasoning.encrypted_content"]}, ("content",)),
            ({"reasoning": {"summary": "auto"}}, ()),
        ):
            output = (await respond(server, tools=[F], **more))["output"]
            for name in lost:
                del output[0][name]
            call = output[2]
            given = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
            await server.post(PATH, input=[{"role": "user", "content": "one two"}, *output, given], tools=[F])
            user, answer, result = engine.chats[-1].messages
            calls = answer.pop("tool_calls")
            assert user == {"role": "user", "content": "one two"}
            assert answer == said
            assert [one["id"] for one in calls] == [output[2]["call_id"], output[3]["call_id"]]
            assert calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
            assert result == {"role": "tool", "tool_call_id": call["call_id"], "content": "21"}


async def test_a_custom_tool_is_called_with_text() -> None:
    words = [
        "<tool_call>\n",
        '{"name": "patch", "arguments": {"in',
        'put": "a \\"b\\"',
        "\\n\\u00e9 \\ud83d",
        '\\ude00"}}\n',
    ]
    engine = saying(*words, "</tool_call>")
    async with serving(engine) as server:
        response = await respond(server, tools=[PATCH, F])
        (call,) = response["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", 'a "b"\né 😀')
        offered = engine.chats[-1].tools
        assert offered is not None
        assert offered[0]["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
        given = {
            "type": "custom_tool_call_output",
            "call_id": call["call_id"],
            "output": [{"type": "input_text", "text": "ok"}],
        }
        await server.post(PATH, input=[call, given], tools=[PATCH, F])
    said, result = engine.chats[-1].messages
    assert said["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input":"a \\"b\\"\\né 😀"}'}
    assert result["content"] == "ok"


async def test_tools_of_a_namespace_are_called_by_both_names() -> None:
    files = {"type": "namespace", "name": "mcp__files__", "description": "d", "tools": [F, PATCH]}
    words = ["<tool_call>", '\n{"name": "mcp__files__patch", "arguments": {"input": "a"}}\n', "</tool_call>"]
    words += ["<tool_call>", '\n{"name": "mcp__files__f", "arguments": {}}\n', "</tool_call>"]
    engine = saying(*words)
    async with serving(engine) as server:
        patch, f = (await respond(server, tools=[files, F]))["output"]
        offered = engine.chats[-1].tools
        await server.post(PATH, input=[patch, f], tools=[files])
        chosen = {"type": "function", "name": "f", "namespace": "mcp__files__"}
        assert (await server.post(PATH, input="a", tools=[files], tool_choice=chosen)).status_code == 200
        error = await refusal(server, tools=[{**files, "tools": [F, {"type": "image_generation"}]}])
        assert error["param"] == "tools[0].tools[1].type"
        error = await refusal(server, tools=[{**files, "tools": [{**F, "name": f"f{n}"} for n in range(128)]}, F])
        assert error["message"] == "tools: there are 129 with those in namespaces, at most 128"
    assert offered is not None
    assert [tool["function"]["name"] for tool in offered] == ["mcp__files__f", "mcp__files__patch", "f"]
    assert (patch["namespace"], patch["name"], patch["input"]) == ("mcp__files__", "patch", "a")
    assert (f["namespace"], f["name"], f["type"]) == ("mcp__files__", "f", "function_call")
    calls = engine.chats[2].messages[0]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["mcp__files__patch", "mcp__files__f"]


async def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    async with serving(saying("<think>", "a", "</think>", "")) as server:
        response = await respond(server)
    thought, message = response["output"]
    assert (thought["type"], message["content"][0]["text"]) == ("reasoning", "")


async def test_what_is_cut_short_is_incomplete() -> None:
    async with serving(saying(*ALL)) as server:
        in_thought = await respond(server, max_output_tokens=2)
        in_call = await respond(server, max_output_tokens=9, tools=[F])
    assert [item["status"] for item in in_thought["output"]] == ["incomplete"]
    assert [item["status"] for item in in_call["output"]] == ["completed", "completed", "incomplete"]
    assert in_call["output"][2]["arguments"] == '{"a": 1}'
    assert in_call["incomplete_details"] == {"reason": "max_output_tokens"}


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
        told = [one["token"] for item in output[:-1] for one in item["content"][0]["logprobs"]]
        assert told == words[: -len(CALL)]


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
    told = [[one["token"] for one in part["logprobs"]] for part in parts]
    assert told == [["I ", "look."], ["Do", "ne."], ["So", " it", " is."]]


async def test_logprobs_are_bounded() -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 9}
    async with serving(max_answer_candidates=30) as server:
        for stream in (False, True):
            assert (await server.post(PATH, input="one", stream=stream, max_output_tokens=3, **more)).status_code == 200
            error = await refusal(server, stream=stream, max_output_tokens=4, **more)
            assert error["param"] == "top_logprobs"
            assert "max_answer_candidates" in error["message"]


async def test_a_full_queue_answers_at_once() -> None:
    async with serving(FakeEngine(refuse=QueueFullError("full", 7.0))) as server:
        answer = await server.post(PATH, input="one", stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json()["error"]["code"] == "queue_full"


async def test_the_parameters_reach_the_engine() -> None:
    async with serving() as server:
        await server.post(
            PATH,
            input="one",
            temperature=0.25,
            top_p=0.5,
            top_k=7,
            seed=3,
            stop=["x"],
            max_output_tokens=5,
            priority=2,
            cache_salt="salt",
            text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        )
    (asked,) = server.engine.submitted
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.25, 0.5, 7, 3)
    assert (params.stop, params.max_tokens, params.logprobs) == (("x",), 5, None)
    assert params.structured is not None
    assert (params.structured.json, params.structured.strict) == ({"type": "object"}, True)
    assert asked.options["priority"] == 2
    assert asked.options["cache_salt"] == "salt"
    assert asked.options["request_id"].startswith("resp_")


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        ("none", {"enable_thinking": False, "reasoning_effort": "none"}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
        (None, None),
    ],
)
async def test_an_effort_reaches_the_chat_template(effort: str | None, kwargs: dict[str, Any] | None) -> None:
    async with serving() as server:
        await server.post(PATH, input="one", reasoning={"effort": effort})
    assert server.engine.chats[0].template_kwargs == kwargs


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("abort", "incomplete", {"reason": None}), ("length", "incomplete", {"reason": "max_output_tokens"})],
)
async def test_how_an_answer_ended(reason: Any, status: str, details: dict[str, Any]) -> None:
    async with serving(FakeEngine(held=True)) as server:
        asked = asyncio.create_task(server.post(PATH, input="one", stream=True))
        stream = await server.engine.next_stream()
        stream.put(Fragment("a", (1,)), Fragment("", (2,), finish_reason=reason, usage=Usage(1, 2, 0)))
        response = check_order(parse((await asked).text))
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (EngineFailedError("the step failed"), "engine_failed", "server_error"),
        (InvalidRequestError("tools: it grew too large", "tools"), "invalid_request_error", "invalid_prompt"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error_and_a_failed_response(
    error: Exception, told: str, code: str
) -> None:
    async with serving(FakeEngine(held=True)) as server:
        asked = asyncio.create_task(server.post(PATH, input="one", stream=True))
        stream = await server.engine.next_stream()
        stream.put(Fragment("a", (1,)))
        stream.fail(error)
        events = parse((await asked).text)
    *begun, event, failed = events
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert event == {
        **event,
        "type": "error",
        "code": told,
        "message": str(error),
        "param": getattr(error, "param", None),
    }
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert begun


async def test_a_reader_that_is_behind_gets_one_event_for_all_that_waits() -> None:
    async with serving(FakeEngine(held=True)) as server:
        asked = asyncio.create_task(server.post(PATH, input="one", stream=True))
        stream = await server.engine.next_stream()
        stream.put(
            *(Fragment(word, (1,)) for word in WORDS), Fragment("", (), finish_reason="stop", usage=Usage(1, 6, 0))
        )
        events = parse((await asked).text)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "".join(WORDS)
    assert len(deltas) < len(WORDS)
    check_order(events)


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with serving(FakeEngine(held=True)) as server:
        for stream in (True, False):
            raw = await server.connect(PATH, input="one", stream=stream)
            held = await server.engine.next_stream()
            raw.close()
            async with asyncio.timeout(10):
                await held.aborted.wait()


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
            "changed",
        ),
        (
            {"tools": [{"type": "image_generation"}]},
            "tools[0].type",
            "'image_generation' is a tool that OpenAI's servers",
        ),
        (
            {"tools": [F, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "no tool that",
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
        ({"tools": [F], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "no tool that is offered"),
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
        ({"background": True}, "background", "stream them"),
        ({"conversation": "conv_1"}, "conversation", "send their items"),
        ({"prompt": {"id": "p"}}, "prompt", "templates are not kept"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "it is called input here"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text with format"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning with effort"),
        ({"n": 2}, "n", "a response is one"),
        ({"echo": True}, "echo", "has no such field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "kept_responses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_refused(body: dict[str, Any], param: str, words: str) -> None:
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
async def test_what_asks_for_nothing_is_taken(body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_request_as_codex_sends_it(caplog: pytest.LogCaptureFixture) -> None:
    """A request with all of Codex's fields. Thoughts have a summary and encrypted content, items no ids."""
    engine = saying(*ALL)
    shell = {**F, "name": "f", "description": "Runs a command."}
    said = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "permissions"}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]}
    body = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "tools": [shell, {"type": "namespace", "name": "mcp__docs__", "description": "", "tools": [F]}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-thread",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    async with serving(engine) as server:
        thought, message, call, _ = (await respond(server, input=[said, asked], **body))["output"]
        kept = [{name: value for name, value in item.items() if name != "id"} for item in (thought, message, call)]
        given = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        await respond(server, input=[said, asked, *kept, given], **body)
    system, user, answer, result = engine.chats[-1].messages
    assert system == {"role": "system", "content": "You are a coding agent.\n\npermissions"}
    assert (user["content"], answer["content"], result["content"]) == ("do it", "I look.", "done")
    assert answer["reasoning_content"] == "I call."
    assert caplog.text == ""
