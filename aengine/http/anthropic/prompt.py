"""Converts messages of content blocks to messages for a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from msgspec.structs import replace

from aengine.errors import InvalidRequestError
from aengine.http.anthropic.bodies import BlockSource, ContentBlock, CountTokensRequest, ResultPart
from aengine.http.fields.image_sources import EncodedImage, ImageSource, LinkedImage
from aengine.http.fields.images import MediaRules, Piece, content_of

_BLOCKS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_REQUIRED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_NO_TEXT = ("document", "search_result", "container_upload")
# Claude Code's system prompt begins with a billing line that differs for each conversation. With this line no two
# conversations would share a cached prefix.
_BILLING_LINE = "x-anthropic-billing-header:"


class _Placed(NamedTuple):
    """A block and its place in the request."""

    role: str
    path: str
    block: ContentBlock


def chat_messages(body: CountTokensRequest, rules: MediaRules, *, late_system: str) -> list[dict[str, Any]]:
    """Return the messages for `encode_chat`. Turns of one role are joined; tool results are separate messages.

    rules: which parts the model reads.
    late_system: the role for system messages after the beginning, which some templates refuse.
    Raises `InvalidRequestError`, naming the block.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of tools, by the id of the call
    for role, turn in groupby(_placed(body, rules, late_system), lambda placed: placed.role):
        placed = list(turn)
        blocks = [one.block for one in placed]
        if role == "assistant":
            names |= {block.id: block.name for block in blocks if block.id is not None and block.name is not None}
            messages.append(_assistant_message(blocks))
        elif role == "user":
            messages += _user_messages(placed, names)
        elif text := _text(blocks):
            messages.append({"role": "system", "content": text})
    return messages


def has_late_system(body: CountTokensRequest) -> bool:
    """Whether the list of messages has a system message."""
    return any(message.role == "system" for message in body.messages)


def _placed(body: CountTokensRequest, rules: MediaRules, late_system: str) -> Iterator[_Placed]:
    at_start = True
    newest = max((place for place, message in enumerate(body.messages) if message.role == "user"), default=None)
    for index, block in enumerate(_as_blocks(body.system or [])):
        if index or not (block.text or "").startswith(_BILLING_LINE):
            yield _checked(_Placed("system", f"system[{index}]", block))
    for place, message in enumerate(body.messages):
        at_start = at_start and message.role == "system"
        role = late_system if message.role == "system" and not at_start else message.role
        for index, block in enumerate(_as_blocks(message.content)):
            one = _Placed(message.role, f"messages[{place}].content[{index}]", block)
            yield _checked(_read(one, rules, newest=place == newest))._replace(role=role)


def _as_blocks(content: str | Sequence[ResultPart] | Sequence[ContentBlock]) -> Iterator[ContentBlock]:
    for block in [ContentBlock(type="text", text=content)] if isinstance(content, str) else content:
        yield (
            block
            if isinstance(block, ContentBlock)
            else ContentBlock(type=block.type, text=block.text, source=block.source)
        )


def _read(placed: _Placed, rules: MediaRules, newest: bool) -> _Placed:
    """Return the block with texts in place of media that the model does not read.

    Raises `InvalidRequestError` for such media in the user's newest message, except in tool results.
    """
    role, path, block = placed
    if isinstance(block.content, list):
        parts = []
        for index, part in enumerate(block.content):
            instead = rules.instead_of(part.type, "tool", f"{path}.content[{index}]", newest=False)
            parts.append(part if instead is None else ResultPart(type="text", text=instead))
        return placed._replace(block=replace(block, content=parts))
    instead = rules.instead_of(block.type, role, path, newest=newest)
    return placed if instead is None else placed._replace(block=ContentBlock(type="text", text=instead))


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
            if part.type not in ("text", "image"):
                _refuse(part.type, f"{place}.type", "a result has blocks of type text, image")
            if part.type == "text" and part.text is None:
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


def _user_messages(turn: Sequence[_Placed], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a message for each tool result, and messages for the user's text and images between and after them."""
    for is_result, run in groupby(turn, lambda placed: placed.block.type == "tool_result"):
        if not is_result:
            pieces = [piece for _, path, block in run for piece in _pieces(block, path)]
            yield {"role": "user", "content": content_of(pieces, "\n")}
            continue
        for _, path, block in run:
            call = block.tool_use_id or ""
            message = {"role": "tool", "tool_call_id": call, "content": _result(block, path)}
            yield message | ({"name": names[call]} if call in names else {})


def _pieces(block: ContentBlock | ResultPart, path: str) -> Iterator[Piece]:
    """Yield the block's text, unless it is empty, or its image. Raises `InvalidRequestError`."""
    if block.type == "image":
        yield _image(block.source, f"{path}.source")
    elif block.text:
        yield block.text


def _image(source: BlockSource | str | None, path: str) -> ImageSource:
    if not isinstance(source, BlockSource):
        raise InvalidRequestError(f"{path}: a block of type 'image' must have it, with type, media_type and data", path)
    field = {"base64": "data", "url": "url"}.get(source.type or "")
    if field is None:
        remedy = "no files are kept here; send the image with a source of type base64"
        remedy = remedy if source.type == "file" else "must be base64 or url"
        raise InvalidRequestError(f"{path}.type: {remedy}", f"{path}.type")
    value: str | None = getattr(source, field)
    if value is None:
        raise InvalidRequestError(f"{path}.{field}: a source of type {source.type} must have it", f"{path}.{field}")
    return (EncodedImage if field == "data" else LinkedImage)(f"{path}.{field}", value)


def _result(block: ContentBlock, path: str) -> str | list[dict[str, Any]]:
    content = block.content or ""
    pieces: list[Piece] = [content] if isinstance(content, str) else []
    if not isinstance(content, str):
        for index, part in enumerate(content):
            pieces += _pieces(part, f"{path}.content[{index}]")
    # Templates have no field for a failed result, so the text says it.
    if block.is_error:
        first = pieces[0] if pieces else ""
        if not isinstance(first, str):
            pieces.insert(0, "Error:")
        elif not first.lower().startswith("error"):
            pieces[:1] = [f"Error: {first}"]
    return content_of(pieces, "\n")
