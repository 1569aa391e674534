"""`POST /v1/responses`: the prompt, the whole answer, and the same answer as events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine.errors import EngineFailedError, InvalidRequestError, QueueFullError
from aengine.types import Fragment, Usage
from tests.http.fake_engine import WORDS, FakeEngine
from tests.http.responses.creating import CALL, PATCH, PATH, F, refusal, respond, saying
from tests.http.responses.streams import check_order, parse
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

ALL = ["<think>", "\nI call.", "\n</think>", "\n\nI ", "look.\n", *CALL, "\n", *CALL]


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
async def test_a_thought_is_in_the_summary_on_request(field: str) -> None:
    async with serving(saying(*ALL)) as server:
        response = await respond(server, reasoning={field: "concise"}, include=["reasoning.encrypted_content"])
    thought = response["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "I call."}]
    assert "content" not in thought
    assert response["reasoning"] == {"effort": None, "summary": "concise"}


async def test_items_sent_back_give_the_original_messages() -> None:
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


async def test_an_empty_answer_is_an_empty_message() -> None:
    async with serving(saying("<think>", "a", "</think>", "")) as server:
        response = await respond(server)
    thought, message = response["output"]
    assert (thought["type"], message["content"][0]["text"]) == ("reasoning", "")


async def test_an_answer_that_is_cut_short_is_incomplete() -> None:
    async with serving(saying(*ALL)) as server:
        in_thought = await respond(server, max_output_tokens=2)
        in_call = await respond(server, max_output_tokens=9, tools=[F])
    assert [item["status"] for item in in_thought["output"]] == ["incomplete"]
    assert [item["status"] for item in in_call["output"]] == ["completed", "completed", "incomplete"]
    assert in_call["output"][2]["arguments"] == '{"a": 1}'
    assert in_call["incomplete_details"] == {"reason": "max_output_tokens"}


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
    (requested,) = server.engine.submitted
    params = requested.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.25, 0.5, 7, 3)
    assert (params.stop, params.max_tokens, params.logprobs) == (("x",), 5, None)
    assert params.structured is not None
    assert (params.structured.json, params.structured.strict) == ({"type": "object"}, True)
    assert requested.options["priority"] == 2
    assert requested.options["cache_salt"] == "salt"
    assert requested.options["request_id"].startswith("resp_")


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
        requested = asyncio.create_task(server.post(PATH, input="one", stream=True))
        stream = await server.engine.next_stream()
        stream.put(Fragment("a", (1,)), Fragment("", (2,), finish_reason=reason, usage=Usage(1, 2, 0)))
        response = check_order(parse((await requested).text))
    assert (response["status"], response["incomplete_details"]) == (status, details)
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "reported", "code"),
    [
        (EngineFailedError("the step failed"), "engine_failed", "server_error"),
        (InvalidRequestError("tools: it grew too large", "tools"), "invalid_request_error", "invalid_prompt"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error_and_a_failed_response(
    error: Exception, reported: str, code: str
) -> None:
    async with serving(FakeEngine(held=True)) as server:
        requested = asyncio.create_task(server.post(PATH, input="one", stream=True))
        stream = await server.engine.next_stream()
        stream.put(Fragment("a", (1,)))
        stream.fail(error)
        events = parse((await requested).text)
    *begun, event, failed = events
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert event == {
        **event,
        "type": "error",
        "code": reported,
        "message": str(error),
        "param": getattr(error, "param", None),
    }
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert begun


async def test_waiting_text_is_merged_into_one_event() -> None:
    async with serving(FakeEngine(held=True)) as server:
        requested = asyncio.create_task(server.post(PATH, input="one", stream=True))
        stream = await server.engine.next_stream()
        stream.put(
            *(Fragment(word, (1,)) for word in WORDS), Fragment("", (), finish_reason="stop", usage=Usage(1, 6, 0))
        )
        events = parse((await requested).text)
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
            async with asyncio.timeout(60):
                await held.aborted.wait()


async def test_a_request_as_codex_sends_it(caplog: pytest.LogCaptureFixture) -> None:
    """A request with all of Codex's fields. Thoughts have a summary and encrypted content, items no ids."""
    engine = saying(*ALL)
    shell = {**F, "name": "f", "description": "Runs a command."}
    said = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "permissions"}]}
    requested = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]}
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
        thought, message, call, _ = (await respond(server, input=[said, requested], **body))["output"]
        kept = [{name: value for name, value in item.items() if name != "id"} for item in (thought, message, call)]
        given = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        await respond(server, input=[said, requested, *kept, given], **body)
    system, user, answer, result = engine.chats[-1].messages
    assert system == {"role": "system", "content": "You are a coding agent.\n\npermissions"}
    assert (user["content"], answer["content"], result["content"]) == ("do it", "I look.", "done")
    assert answer["reasoning_content"] == "I call."
    assert caplog.text == ""
