"""Converts messages of content blocks to messages for a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from msgspec.structs import replace

from aengine.errors import InvalidRequestError
from aengine.http.anthropic.bodies import ContentBlock, CountTokensRequest, ResultPart
from aengine.http.fields.messages import media_placeholder

_BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_NO_TEXT = ("image", "document", "search_result", "container_upload")
# Claude Code's system prompt begins with a billing line that differs for each conversation. With this line no two
# conversations would share a cached prefix.
_BILLING_LINE = "x-anthropic-billing-header:"


class _Placed(NamedTuple):
    """A block and its place in the request."""

    role: str
    path: str
    block: ContentBlock


def chat_messages(body: CountTokensRequest, *, late_system: str) -> list[dict[str, Any]]:
    """Return the messages for the chat template. Turns of one role are joined; tool results are separate messages.

    late_system: the role for system messages after the beginning, which some templates refuse.
    Raises `InvalidRequestError`, naming the block.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of tools, by the id of the call
    for role, turn in groupby(_placed(body, late_system), lambda placed: placed.role):
        blocks = [placed.block for placed in turn]
        if role == "assistant":
            names |= {block.id: block.name for block in blocks if block.id is not None and block.name is not None}
            messages.append(_assistant_message(blocks))
        elif role == "user":
            messages += _user_messages(blocks, names)
        elif text := _text(blocks):
            messages.append({"role": "system", "content": text})
    return messages


def has_late_system(body: CountTokensRequest) -> bool:
    """Whether the list of messages has a system message."""
    return any(message.role == "system" for message in body.messages)


def _placed(body: CountTokensRequest, late_system: str) -> Iterator[_Placed]:
    at_start = True
    newest = max((place for place, message in enumerate(body.messages) if message.role == "user"), default=None)
    for index, block in enumerate(_as_blocks(body.system or [])):
        if index or not (block.text or "").startswith(_BILLING_LINE):
            yield _checked(_Placed("system", f"system[{index}]", block))
    for place, message in enumerate(body.messages):
        at_start = at_start and message.role == "system"
        role = late_system if message.role == "system" and not at_start else message.role
        for index, block in enumerate(_as_blocks(message.content)):
            block = _without_media(block, newest=place == newest)
            checked = _checked(_Placed(message.role, f"messages[{place}].content[{index}]", block))
            yield checked._replace(role=role)


def _as_blocks(content: str | Sequence[ResultPart] | Sequence[ContentBlock]) -> Iterator[ContentBlock]:
    for block in [ContentBlock(type="text", text=content)] if isinstance(content, str) else content:
        yield block if isinstance(block, ContentBlock) else ContentBlock(type=block.type, text=block.text)


def _without_media(block: ContentBlock, newest: bool) -> ContentBlock:
    """Return the block with texts in place of images and files.

    They are replaced in tool results, and in all messages but the user's newest one.
    """
    if isinstance(block.content, list):
        parts = [
            part if (instead := media_placeholder(part.type)) is None else ResultPart(type="text", text=instead)
            for part in block.content
        ]
        return replace(block, content=parts)
    instead = None if newest else media_placeholder(block.type)
    return block if instead is None else ContentBlock(type="text", text=instead)


def _checked(placed: _Placed) -> _Placed:
    """Return the block unchanged. Raises `InvalidRequestError` if its role does not allow it, or a field is missing."""
    role, path, block = placed
    if block.type not in _BLOCKS[role]:
        _refuse(block.type, f"{path}.type", f"a {role} message has blocks of type {', '.join(_BLOCKS[role])}")
    for name in _REQUIRED.get(block.type, ()):
        if getattr(block, name) is None:
            raise InvalidRequestError(f"{path}.{name}: a block of type {block.type!r} must have it", f"{path}.{name}")
    if block.type == "tool_result" and isinstance(block.content, list):
        for index, part in enumerate(block.content):
            place = f"{path}.content[{index}]"
            if part.type != "text":
                _refuse(part.type, f"{place}.type", "a result is text")
            if part.text is None:
                raise InvalidRequestError(f"{place}.text: a block of type 'text' must have it", f"{place}.text")
    return placed


def _refuse(kind: str, path: str, instead: str) -> None:
    kind = kind[:64]
    reason = "this model reads text only, not" if kind in _NO_TEXT else f"{instead}, not"
    raise InvalidRequestError(f"{path}: {reason} {kind!r}", path)


def _text(blocks: Sequence[ContentBlock] | Sequence[ResultPart]) -> str:
    """Return the text of blocks, joined by line breaks."""
    return "\n".join(block.text for block in blocks if block.type == "text" and block.text)


def _assistant_message(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if block.type == "tool_use"
    ]
    thought = "\n".join(block.thinking for block in blocks if block.thinking)
    text = _text(blocks)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[ContentBlock], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a message for each tool result, and messages for the user's text between and after them."""
    for kind, run in groupby(blocks, lambda block: block.type):
        if kind == "text":
            yield {"role": "user", "content": _text(list(run))}
        else:
            for block in run:
                call = block.tool_use_id or ""
                message = {"role": "tool", "tool_call_id": call, "content": _result(block)}
                yield message | ({"name": names[call]} if call in names else {})


def _result(block: ContentBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content)
    # Templates have no field for a failed result, so the text says it.
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text
