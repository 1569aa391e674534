"""Messages of content blocks as messages for the chat template."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.errors import InvalidRequestError
from aengine.http.anthropic.bodies import CountTokensRequest
from aengine.http.anthropic.prompt import chat_messages
from aengine.http.fields.images import MediaRules


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": f"tool{number}", "input": arguments}


def result(number: int, content: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if content is None else {"content": content}
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", **given, **more}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return user(*content) | {"role": "assistant"}


def rendered(*messages: dict[str, Any], late_system: str = "system", **more: Any) -> list[dict[str, Any]]:
    body = msgspec.convert({"messages": list(messages), **more}, CountTokensRequest)
    return chat_messages(body, MediaRules("it reads text only", in_results=False), late_system=late_system)


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def test_a_string_is_short_for_a_block() -> None:
    as_strings = rendered(user("hi"), assistant("hello"), user("bye"), system="be kind")
    as_blocks = rendered(
        user(text("hi", **CACHED)),
        assistant(text("hello", citations=None)),
        user(text("bye")),
        system=[text("be kind")],
    )
    assert as_strings == as_blocks
    assert as_strings == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
    ]


def test_blocks_begin_on_a_line_each() -> None:
    assert rendered(user(text("a"), text(""), text("b")), system=[text("c", **CACHED), text("d")]) == [
        {"role": "system", "content": "c\nd"},
        {"role": "user", "content": "a\nb"},
    ]


def test_turns_of_one_role_are_joined() -> None:
    assert rendered(user("a"), user("b"), assistant("c"), assistant(text("d"), call(1))) == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "c\nd",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "tool1", "arguments": {}}}],
        },
    ]


def test_calls_and_their_results() -> None:
    history = (
        user("weather?"),
        assistant(call(1, city="Rome"), call(2, city="Oslo")),
        user(result(1, "sunny"), result(2, [text("rain"), text("wind")]), text("and?"), text("well?")),
    )
    assert rendered(*history)[1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "tool1", "arguments": {"city": "Rome"}}},
                {"id": "toolu_2", "type": "function", "function": {"name": "tool2", "arguments": {"city": "Oslo"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "tool1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "tool2", "content": "rain\nwind"},
        {"role": "user", "content": "and?\nwell?"},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result(1), ""),
        (result(1, []), ""),
        (result(1, "no such file", is_error=True), "Error: no such file"),
        (result(1, [text("no such file")], is_error=True), "Error: no such file"),
        (result(1, "Error: no such file", is_error=True), "Error: no such file"),
        (result(1, "fine", is_error=False), "fine"),
    ],
)
def test_tool_results(block: dict[str, Any], content: str) -> None:
    assert rendered(user(block)) == [{"role": "tool", "tool_call_id": "toolu_1", "content": content}]


def test_thoughts_are_accepted_with_any_signature() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "any"}
    redacted = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    empty = {"type": "thinking", "thinking": "", "signature": "omitted"}
    assert rendered(assistant(thought, redacted, empty, text("a"))) == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    ]


def test_later_system_messages_stay_in_place() -> None:
    history = (user("a"), {"role": "system", "content": [text("new rules")]}, user("b"))
    assert rendered(*history, system="rules") == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "new rules"},
        {"role": "user", "content": "b"},
    ]
    # For templates that allow only one system message:
    assert rendered(*history, system="rules", late_system="user") == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nnew rules\nb"},
    ]


@pytest.mark.parametrize("late_system", ["system", "user"])
def test_a_system_message_at_the_beginning_is_the_system_prompts(late_system: str) -> None:
    first = {"role": "system", "content": "more rules"}
    assert rendered(first, user("a"), system="rules", late_system=late_system)[0] == {
        "role": "system",
        "content": "rules\nmore rules",
    }


def test_the_accounts_of_claude_code_are_no_part_of_a_prompt() -> None:
    accounts = text("x-anthropic-billing-header: cc_version=2.1.185.a3f; cc_entrypoint=cli; cch=00000;")
    assert rendered(user("a"), system=[accounts, text("rules")])[0] == {"role": "system", "content": "rules"}
    assert rendered(user("a"), system=[text("rules"), accounts])[0]["content"].startswith("rules\nx-anthropic")


@pytest.mark.parametrize(
    ("messages", "path", "words"),
    [
        (
            [user({"type": "image", "source": {}})],
            "messages[0].content[0].type",
            "takes no images: it reads text only; send",
        ),
        ([user(text("a"), {"type": "document"})], "messages[0].content[1].type", "reads text only, not 'document'"),
        (
            [user("a"), user(result(1, [{"type": "search_result"}]))],
            "messages[1].content[0].content[0].type",
            "reads text only",
        ),
        ([user(result(1, [{"type": "tool_reference"}]))], "messages[0].content[0].content[0].type", "'tool_reference'"),
        ([user(result(1, [{"type": "text"}]))], "messages[0].content[0].content[0].text", "must have it"),
        ([user(call(1))], "messages[0].content[0].type", "not 'tool_use'"),
        ([assistant(result(1))], "messages[0].content[0].type", "not 'tool_result'"),
        ([assistant({"type": "server_tool_use"})], "messages[0].content[0].type", "not 'server_tool_use'"),
        ([{"role": "system", "content": [call(1)]}], "messages[0].content[0].type", "not 'tool_use'"),
        ([user({"type": "text"})], "messages[0].content[0].text", "must have it"),
        ([assistant({"type": "thinking", "signature": "a"})], "messages[0].content[0].thinking", "must have it"),
        ([assistant({"type": "tool_use", "id": "a", "name": "b"})], "messages[0].content[0].input", "must have it"),
        ([user({"type": "tool_result"})], "messages[0].content[0].tool_use_id", "must have it"),
        ([user({"type": "x" * 10_000})], "messages[0].content[0].type", f"not '{'x' * 64}'"),
    ],
)
def test_unsupported_blocks_are_refused_by_their_path(messages: list[Any], path: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        rendered(*messages)
    assert refused.value.param == path
    assert str(refused.value).startswith(f"{path}: ")
    assert words in str(refused.value)
    assert len(str(refused.value)) < 300


texts = st.builds(text, st.text(max_size=8))
tool_results = st.builds(
    result, st.integers(0, 3), st.none() | st.text(max_size=8) | st.lists(texts, max_size=3), is_error=st.booleans()
)
thoughts = st.builds(lambda said: {"type": "thinking", "thinking": said, "signature": ""}, st.text(max_size=8))
calls = st.builds(call, st.integers(0, 3), a=st.text(max_size=8))
BLOCKS = {"user": texts | tool_results, "assistant": texts | thoughts | calls, "system": texts}
turns = st.sampled_from(sorted(BLOCKS)).flatmap(
    lambda role: st.fixed_dictionaries({"role": st.just(role), "content": st.text() | st.lists(BLOCKS[role])})
)


@pytest.mark.hypothesis
@given(st.lists(turns, min_size=1, max_size=6), st.text(max_size=8) | st.lists(texts, max_size=2))
def test_every_text_is_in_the_messages(history: list[dict[str, Any]], system: Any) -> None:
    """Every text, thought, call and result is in the messages, in order. No two turns of one role are adjacent."""
    said, called, thought = [], [], []
    for content in (system, *(turn["content"] for turn in history)):
        for block in [text(content)] if isinstance(content, str) else content:
            match block["type"]:
                case "text":
                    said.append(block["text"])
                case "thinking":
                    thought.append(block["thinking"])
                case "tool_use":
                    called.append(block["id"])
                case _:
                    content = block.get("content") or ""
                    said += [content] if isinstance(content, str) else [part["text"] for part in content]
    for late_system in ("system", "user"):
        messages = rendered(*history, system=system, late_system=late_system)
        written = "\n".join(message["content"] or "" for message in messages)
        place = 0
        for piece in filter(None, said):
            place = written.index(piece, place) + len(piece)
        reasoning = "\n".join(message.get("reasoning_content", "") for message in messages)
        assert all(piece in reasoning for piece in thought)
        assert [one["id"] for message in messages for one in message.get("tool_calls", ())] == called
        roles = [message["role"] for message in messages if message["role"] != "tool"]
        results = [message["role"] for message in messages]
        if "tool" not in results and late_system == "user":
            assert all(one != other for one, other in pairwise(roles))
