"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import pytest

from aengine.errors import EngineFailedError, InvalidRequestError, QueueFullError
from aengine.http.anthropic import messages as endpoints
from aengine.http.anthropic.prompt import chat_messages
from aengine.text.answer.parser import ChatPrompt
from aengine.types import Fragment, Usage
from tests.http.fake_engine import WORDS, FakeEngine
from tests.http.serving import Server, read_until, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello there"}]
ASKED: dict[str, Any] = {"max_tokens": 20, "messages": HELLO}
LAST = Fragment("!", (9,), None, "stop", Usage(2, 1, 0))


async def refused(server: Server, path: str, status: int, kind: str, **body: Any) -> str:
    """Return the message of a refusal, and check its format."""
    return message_of(await server.post(path, **body), status, kind)


def message_of(response: Any, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    answer = response.json()
    message: str = answer["error"]["message"]
    request_id = response.headers["request-id"]
    assert answer == {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    assert response.headers["x-request-id"] == request_id
    return message


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("within", ["messages", "blocks", "system"])
async def test_many_blocks_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch, path: str, within: str) -> None:
    """Many blocks are converted in a thread, and few are not."""
    threads = []

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return chat_messages(*args, **options)

    monkeypatch.setattr(endpoints, "chat_messages", noted)
    blocks = [{"type": "text", "text": "a"}] * 2500
    many: dict[str, dict[str, Any]] = {
        "messages": {"messages": HELLO * 2500},
        "blocks": {"messages": [{"role": "user", "content": blocks}]},
        "system": {"system": blocks},
    }
    async with serving() as server:
        server.engine.max_model_len = 10**6
        assert (await server.post(path, **{**ASKED, **many[within]})).status_code == 200
        assert (await server.post(path, **ASKED)).status_code == 200
    in_thread, at_once = (thread is not threading.main_thread() for thread in threads)
    assert (in_thread, at_once) == (True, False)


async def test_answers_at_once_by_default() -> None:
    async with serving() as server:
        response = await server.client.post(PATH, json=ASKED, headers={"X-Request-Id": "mine"})
    assert (response.headers["request-id"], response.headers["x-request-id"]) == ("mine", "mine")
    answer = response.json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "".join(WORDS)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_only_these_paths_speak_so() -> None:
    async with serving() as server:
        for path in ("/v1/chat/completions", "/v1/messagesx", "/x/v1/messages"):
            response = await server.post(path)
            assert "request-id" not in response.headers
            assert "code" in response.json()["error"]


async def test_the_parameters_for_the_engine() -> None:
    async with serving() as server:
        more = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "stop_sequences": ["a", "b"]}
        assert (await server.post(PATH, **ASKED, **more)).status_code == 200
        assert (await server.post(PATH, **ASKED)).status_code == 200
        first, plain = (one.params for one in server.engine.submitted)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (20, 0.25, 0.5, 7)
    assert first.stop == ("a", "b")
    assert (plain.temperature, plain.stop) == (server.engine.default_params.temperature, ())


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"enable_thinking": True, "reasoning_effort": "max"},
        ),
    ],
)
async def test_the_variables_for_the_template(fields: dict[str, Any], kwargs: dict[str, Any] | None) -> None:
    async with serving() as server:
        for path, body in ((PATH, ASKED), (COUNT, {"messages": HELLO})):
            assert (await server.post(path, **body, **fields)).status_code == 200
        requested, counted = server.engine.chats
    assert requested == counted
    assert requested.template_kwargs == kwargs
    assert (requested.tools, requested.continue_final_message) == (None, False)


async def test_a_template_with_one_system_message_gets_one() -> None:
    class Strict(FakeEngine):
        async def encode_chat(
            self, messages: list[dict[str, Any]], context: int | None = None, **options: Any
        ) -> ChatPrompt:
            if any(message["role"] == "system" for message in messages[1:]):
                raise InvalidRequestError("System message must be at the beginning.", "messages")
            return await super().encode_chat(messages, context, **options)

    history = [*HELLO, {"role": "system", "content": "new rules"}]
    for engine in (FakeEngine(), Strict()):
        async with serving(engine) as server:
            assert (await server.post(PATH, max_tokens=9, messages=history, system="rules")).status_code == 200
        kept = isinstance(engine, Strict)
        assert [message["role"] for message in engine.chats[0].messages[1:]] == ["user", "system"][: 2 - kept]
        assert engine.chats[0].messages[-1]["content"].endswith("new rules")


@pytest.mark.parametrize(
    "path", ["/messages", "/v1/messages/", "/v1/v1/messages", "//v1/messages", "/v1/messages?beta=true"]
)
async def test_aliases(path: str) -> None:
    async with serving() as server:
        assert (await server.post(path, **ASKED)).json()["type"] == "message"
        response = await server.post(path)
        assert response.json()["type"] == "error"
        assert response.headers["request-id"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": HELLO}, "max_tokens: Object missing required field"),
        ({"max_tokens": 9}, "messages: Object missing required field"),
        (ASKED | {"messages": []}, "messages: Expected"),
        (ASKED | {"max_tokens": -1}, "max_tokens"),
        (ASKED | {"max_tokens": "many"}, "max_tokens: Expected `int`"),
        (ASKED | {"temperature": 3}, "temperature"),
        (ASKED | {"top_p": 0}, "top_p"),
        (ASKED | {"stop_sequences": [""]}, "stop_sequences"),
        (ASKED | {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        (ASKED | {"stop_sequences": "a"}, "stop_sequences: Expected `array"),
        (ASKED | {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: Invalid enum value 'tool'"),
        (ASKED | {"messages": [{"role": "user", "content": 7}]}, "messages[0].content: Expected"),
        (ASKED | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: "),
        (ASKED | {"system": [{"type": "image"}]}, "system[0].type: "),
        (ASKED | {"thinking": {"type": "hard"}}, "thinking.type: Invalid enum value 'hard'"),
        (ASKED | {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
        (ASKED | {"tool_choice": {"type": "any"}}, "tool_choice: "),
        (ASKED | {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: "),
        (ASKED | {"n": 2}, "n: /v1/messages has no such field"),
        (ASKED | {"logprobs": 2}, "logprobs: /v1/messages has no such field"),
        (ASKED | {"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers: "),
        (ASKED | {"container": "container_1"}, "container: "),
        (ASKED | {"compaction": {"type": "enabled"}}, "compaction: "),
    ],
)
async def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    async with serving() as server:
        assert (await refused(server, PATH, 400, "invalid_request_error", **fields)).startswith(words)
        assert server.engine.submitted == []


async def test_a_thread_is_refused_with_the_code_for_the_client() -> None:
    async with serving() as server:
        answer = (await server.post(PATH, **ASKED, thread={"type": "create"})).json()
        assert answer["error"]["details"] == {"error_code": "thread_unsupported_request"}
        assert (await server.post(PATH, **ASKED, thread=None)).status_code == 200


async def test_fields_without_effect_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    more = {
        "metadata": {"user_id": "u", "of_tomorrow": {}},
        "betas": {"of": "tomorrow"},
        "anthropic_beta": ["x"],
        "anthropic_version": "vertex-2023-10-16",
        "service_tier": "standard_only",
        "speed": "fast",
        "inference_geo": "eu",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "diagnostics": {"previous_message_id": None},
        "fallbacks": "default",
        "mcp_servers": [],
        "container": None,
        "user": "u",
    }
    async with serving() as server:
        with caplog.at_level(logging.WARNING, "aengine"):
            assert (await server.post(PATH, **ASKED, **more)).status_code == 200
            assert (await server.post(COUNT, **ASKED, **more)).status_code == 200
        assert not caplog.records
        with caplog.at_level(logging.WARNING, "aengine"):
            assert (await server.post(PATH, **ASKED, of_tomorrow=1)).status_code == 200
        assert "of_tomorrow" in caplog.text


async def test_early_refusals_have_anthropics_format() -> None:
    invalid = "invalid_request_error"
    page = {"Origin": "http://elsewhere.example"}
    async with serving(api_keys=("k",), max_body_bytes=1000) as server:
        key = {"x-api-key": "k"}
        post = server.client.post
        for path in (PATH, COUNT, "/v1/messages/batches", "/messages"):
            message = message_of(await post(path, json=ASKED), 401, "authentication_error")
            assert "x-api-key" in message
        assert "elsewhere" not in message_of(await post(PATH, json=ASKED, headers=page), 403, "permission_error")
        message_of(await post(PATH, json=ASKED, headers={"Host": "rebound.example"}), 403, "permission_error")
        message_of(await post(PATH, content=b"x" * 1001, headers=key), 413, "request_too_large")
        message_of(await post(PATH, content=b"{", headers=key), 400, invalid)
        message_of(await post(PATH, content=b"\xff", headers=key), 400, invalid)
        message_of(await post(PATH, content=b"", headers=key), 400, invalid)
        nan = message_of(await post(PATH, content=b'{"max_tokens": NaN}', headers=key), 400, invalid)
        assert nan.startswith("max_tokens: ")
        message_of(await post(PATH, content=b"a", headers=key | {"Content-Type": "text/xml"}), 415, invalid)
        message_of(await server.client.get(PATH, headers=key), 405, invalid)
        message = message_of(await post("/v1/messages/batches", json={}, headers=key), 404, "not_found_error")
        assert "/v1/messages" in message
        message_of(await post(PATH, json=ASKED | {"model": "other"}, headers=key), 404, "not_found_error")
        assert server.engine.submitted == []


async def test_a_body_that_does_not_come() -> None:
    async with serving(body_timeout=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
    assert b" 408 " in answer
    assert b'{"type":"error","error":{"type":"invalid_request_error"' in answer


async def test_a_count_stands_in_no_queue() -> None:
    async with serving(FakeEngine(refuse=QueueFullError("full", retry_after=3.0))) as server:
        response = await server.post(PATH, **ASKED)
        assert message_of(response, 529, "overloaded_error") == "full"
        assert response.headers["retry-after"] == "3"
        assert (await server.post(COUNT, messages=HELLO)).json() == {"input_tokens": 2}
        assert (await server.post(COUNT, **ASKED, stream=True, temperature=9)).json() == {"input_tokens": 2}


async def test_pings_break_a_silence() -> None:
    """Before the first token and between tokens, because a long prompt takes a while."""
    async with serving(FakeEngine(held=True), heartbeat=0.05) as server:
        raw = await server.connect(PATH, **ASKED, stream=True)
        held = await server.engine.next_stream()
        begin = await read_until(raw, b'event: ping\ndata: {"type":"ping"}\n\n')
        silent = await read_until(raw, b"ping")  # nothing has been generated
        held.put(Fragment("a", (1,)))
        await read_until(raw, b"content_block_delta")
        between = await read_until(raw, b"ping")
        held.put(LAST)
        rest = await read_until(raw, b'{"type":"message_stop"}\n\n')
        raw.close()
    assert b"message_start" in begin
    assert b"content_block" not in silent
    assert b"content_block_stop" not in between
    assert b"event: message_delta" in rest
    assert b": ping\n\n" not in (begin + silent + between + rest).replace(b"event: ping", b"")


async def test_a_failure_on_its_way_is_an_event() -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect(PATH, **ASKED, stream=True)
        held = await server.engine.next_stream()
        held.put(Fragment("a", (1,)))
        await read_until(raw, b"content_block_delta")
        held.fail(EngineFailedError("the step failed at /opt/engine/step.py"))
        said = b""
        while b"\n\n" not in said.partition(b"event: error")[2]:
            said += await read_until(raw, b"\n\n")
        raw.close()
    answer = said.decode()
    event = answer[answer.index("event: error") :].split("\n")
    payload = json.loads(event[1].removeprefix("data: "))
    assert payload["error"] == {"type": "api_error", "message": "the step failed at step.py"}
    assert payload["request_id"]


async def test_streams_end_with_an_error_when_the_server_stops() -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect(PATH, **ASKED, stream=True)
        await server.engine.next_stream()
        await read_until(raw, b"ping")
        server.stop.set()
        answer = await read_until(raw, b"overloaded_error")
        raw.close()
    assert b"event: error\ndata: " in answer
    assert b"shutting down" in answer


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect(PATH, **ASKED, stream=stream)
        held = await server.engine.next_stream()
        raw.close()
        async with asyncio.timeout(60):
            await held.aborted.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_can_be_aborted_by_its_id(stream: bool) -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect(PATH, **ASKED, stream=stream)
        held = await server.engine.next_stream()
        held.put(Fragment("a", (1,)))
        if stream:
            await read_until(raw, b"content_block_delta")
        assert held.id.startswith("msg_")
        assert (await server.post("/abort", request_id=held.id)).json() == {"aborted": 1}
        answer = await read_until(raw, b"aborted")
        raw.close()
    assert (b"event: error" in answer) == stream
    assert b"api_error" in answer
