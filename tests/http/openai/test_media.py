"""Images and files: a text replaces them in the history, and the newest message with them is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LEFT_OUT = "[image left out: this model reads text only]"
DATA = "data:image/png;base64,AAAA"
IMAGES: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": DATA}},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    RESPONSES: {"type": "input_image", "image_url": DATA},
}
NAMES = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
TEXT: dict[str, dict[str, Any]] = {
    CHAT: {"type": "text", "text": "look "},
    MESSAGES: {"type": "text", "text": "look "},
    RESPONSES: {"type": "input_text", "text": "look "},
}


def user(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [TEXT[path], *parts]}


def result(path: str, image: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool call whose result is an image."""
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": [image]}]
    if path == MESSAGES:
        block = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
        return [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "see", "input": {}}]},
            {"role": "user", "content": [block]},
        ]
    return [
        {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [image]},
    ]


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("where", ["history", "result"])
async def test_a_text_says_that_an_image_was_left_out(path: str, where: str) -> None:
    image = IMAGES[path]
    messages = [user(path), *result(path, image)]
    if where == "history":
        messages = [user(path, image), {"role": "assistant", "content": "no"}, user(path)]
    async with serving() as server:
        answer = await server.post(path, **{NAMES[path]: messages, "max_tokens" if path != RESPONSES else "top_k": 9})
        assert answer.status_code == 200, answer.text
        (chat,) = server.engine.chats
    assert LEFT_OUT in str(chat.messages)
    assert str(chat.messages).count("image") == 1


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("earlier", [0, 1])
async def test_one_in_the_newest_message_of_the_user_is_refused(path: str, earlier: int) -> None:
    messages = [user(path), {"role": "assistant", "content": "no"}] * earlier + [user(path, IMAGES[path])]
    async with serving() as server:
        answer = await server.post(path, **{NAMES[path]: messages, "max_tokens" if path != RESPONSES else "top_k": 9})
        assert server.engine.chats == []
    assert answer.status_code == 400
    assert f"{NAMES[path]}[{2 * earlier}].content[1]" in answer.text
    assert "text only" in answer.text


async def test_files_are_left_out_as_well() -> None:
    part = {"type": "file", "file": {"file_id": "f"}}
    async with serving() as server:
        answer = await server.post(CHAT, messages=[user(CHAT, part), user(CHAT)])
        assert answer.status_code == 200
        (chat,) = server.engine.chats
    assert chat.messages[0]["content"] == "look [file left out: this model reads text only]"
