"""Codex and Claude Code: a turn that calls a tool, and the turn with its result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aengine.text.answer.parser import AnswerFormat
from tests.http.coding_agents import CLAUDE_HEADERS, CODEX_HEADERS, claude_request, codex_request
from tests.http.fake_engine import FakeEngine
from tests.http.responses.streams import check_order, parse
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

THOUGHT = ("<think>\n", "I add", "\n</think>\n\n", "Let me see.")


def agent_engine(name: str, arguments: dict[str, str]) -> FakeEngine:
    """An engine that thinks, answers, and calls a tool."""
    engine = FakeEngine()
    engine.answer_format = AnswerFormat(calls="hermes", thoughts=True)
    engine.max_model_len = 40_000
    call = json.dumps({"name": name, "arguments": arguments})
    engine.words = (*THOUGHT, "\n<tool_call>\n", call, "\n</tool_call>")
    return engine


async def codex_turn(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.client.post("/v1/responses", json=body, headers=CODEX_HEADERS)
    assert answer.status_code == 200, answer.text
    response = check_order(parse(answer.text))
    assert response["status"] == "completed"
    output: list[dict[str, Any]] = response["output"]
    return output


async def test_codex_calls_a_tool_and_continues_with_its_result() -> None:
    engine = agent_engine("exec_command", {"cmd": "echo 42"})
    async with serving(engine) as server:
        thought, message, call = await codex_turn(server, codex_request())
        assert (thought["type"], message["content"][0]["text"], call["name"]) == (
            "reasoning",
            "Let me see.",
            "exec_command",
        )
        assert json.loads(call["arguments"]) == {"cmd": "echo 42"}
        engine.words = ("It is", " 42.")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Output:\n42"}
        back = codex_request({**thought, "content": None}, message, call, result)
        (last,) = await codex_turn(server, back)
    assert last["content"][0]["text"] == "It is 42."
    first, second = engine.chats
    assert first.tools is not None
    names = [tool["function"]["name"] for tool in first.tools]
    assert names == ["exec_command", "get_goal", "multi_agent_v1__close_agent"]  # no web search
    requested, answered = second.messages[-2:]
    assert (requested["role"], requested["reasoning_content"], requested["tool_calls"][0]["function"]["name"]) == (
        "assistant",
        "I add",
        "exec_command",
    )
    assert (answered["role"], answered["content"]) == ("tool", "Output:\n42")


def claude_events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def claude_turn(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.client.post("/v1/messages?beta=true", json=body, headers=CLAUDE_HEADERS)
    assert answer.status_code == 200, answer.text
    events = claude_events(answer.text)
    assert events[-1]["type"] == "message_stop"
    return events


async def test_claude_code_calls_a_tool_and_continues_with_its_result() -> None:
    engine = agent_engine("Bash", {"command": "echo 42"})
    async with serving(engine) as server:
        assert (await server.client.head("/")).status_code == 200  # its first request
        events = await claude_turn(server, claude_request())
        begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [block["type"] for block in begun] == ["thinking", "text", "tool_use"]
        assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["tool_use"]
        engine.words = ("It is", " 42.")
        back = claude_request(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I add", "signature": "unsigned"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": begun[2]["id"], "name": "Bash", "input": {"command": "echo 42"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "tool_use_id": begun[2]["id"],
                        "type": "tool_result",
                        "content": "42",
                        "is_error": False,
                        "cache_control": {"type": "ephemeral"},
                    }
                ],
            },
        )
        events = await claude_turn(server, back)
    said = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(said) == "It is 42."
    system = engine.chats[0].messages[0]
    assert system == {"role": "system", "content": "You are an agent.\n\nYou work on code."}  # no billing header
    assert [message["role"] for message in engine.chats[1].messages] == [
        "system",
        "user",
        "system",
        "assistant",
        "tool",
    ]
    assert engine.chats[1].messages[-1]["content"] == "42"
