"""Converts input items to messages for a chat template."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterable, Sequence
from typing import Any

import msgspec

from aengine.errors import InvalidRequestError
from aengine.http.fields.images import MediaRules, Piece, content_of, image_of_url
from aengine.http.responses.bodies import InputItem, InputPart
from aengine.http.responses.tools import full_name

_THOUGHT_PREFIX = "aengine-thought:"
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_SYSTEM = ("system", "developer")
_SLICE = 1024  # items that are converted in one iteration of the loop; 3 ms


def _pieces(
    content: str | list[InputPart] | None, where: str, role: str, rules: MediaRules, *, newest: bool = False
) -> list[Piece]:
    """Return the texts and images of an item's content. Raises `InvalidRequestError`, naming a part of another type.

    role: of its message. newest: whether it is the user's newest message.
    """
    if content is None or isinstance(content, str):
        return [content or ""]
    pieces: list[Piece] = []
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        instead = rules.instead_of(part.type, role, path, newest=newest)
        pieces.append(_piece(part, path) if instead is None else instead)
    return pieces


def _piece(part: InputPart, path: str) -> Piece:
    if part.type == "input_image":
        if part.file_id is not None:
            raise InvalidRequestError(
                f"{path}.file_id: no files are kept here; send the image as image_url, a data URL in base64",
                f"{path}.file_id",
            )
        return image_of_url(part.image_url, f"{path}.image_url")
    if part.type not in (*_TEXTS, "refusal"):
        raise InvalidRequestError(
            f"{path}.type: an item has parts of type input_text, output_text and input_image, not {part.type!r}",
            f"{path}.type",
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequestError(f"{path}.{name}: a part of type {part.type!r} must have it", f"{path}.{name}")
    return text


def encode_thought(thought: str) -> str:
    """Return a thought as `encrypted_content`. It is base64 without encryption: the client may read the thought.

    Clients such as Codex keep only this field of a thought and send it back.
    """
    return _THOUGHT_PREFIX + base64.b64encode(thought.encode()).decode()


def decode_thought(content: str, where: str) -> str | None:
    """Return the thought in `encrypted_content`; None if another server made it. Raises `InvalidRequestError`."""
    if not content.startswith(_THOUGHT_PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(_THOUGHT_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{where}: it differs from what this server returned", where) from None


async def messages_of(
    instructions: str | None,
    items: Sequence[InputItem],
    rules: MediaRules,
    earlier: AsyncIterable[InputItem] | None = None,
) -> list[dict[str, Any]]:
    """Return the messages of a conversation.

    rules: which parts the model reads. earlier: items of kept turns, before the request's items. It lets other tasks
    run in between.

    The items of an answer (thought, message, calls) become one message of the assistant. All instructions at the
    beginning become one system message, because many templates allow only one. Other tasks run between slices of a
    long conversation. Raises `InvalidRequestError`, naming the item's field.
    """
    conversation = _Conversation(instructions, rules)
    if earlier is not None:
        async for item in earlier:
            conversation.add(item, "previous_response_id", newest=False)
    newest = max((index for index, item in enumerate(items) if item.role == "user"), default=None)
    for index, item in enumerate(items):
        if index % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        conversation.add(item, f"input[{index}]", newest=index == newest)
    return conversation.messages()


class _Conversation:
    """The messages so far. The last one may be an incomplete answer.

    Until the end a text is a list of pieces, because appending to a string would copy it each time.
    """

    def __init__(self, instructions: str | None, rules: MediaRules) -> None:
        self._rules = rules
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        if instructions is not None:
            self._messages.append({"role": "system", "content": [instructions]})

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages with joined texts. Nothing can be added afterwards."""
        for message in self._messages:
            for name in ("content", "reasoning_content"):
                if isinstance(pieces := message.get(name), list):
                    message[name] = content_of(pieces)
        return self._messages

    def add(self, item: InputItem, where: str, newest: bool) -> None:
        """Add an item. newest: whether it is the user's newest message."""
        match item.type:
            case "message" | None:
                self._add_message(item, where, newest)
            case "reasoning":
                self._add_thought(self._thought(item, where))
            case "function_call":
                self._add_call(item, _required(item, "arguments", where), where)
            case "custom_tool_call":
                arguments = msgspec.json.encode({"input": _required(item, "input", where)}).decode()
                self._add_call(item, arguments, where)
            case "function_call_output" | "custom_tool_call_output":
                _required(item, "output", where)
                output = _pieces(item.output, f"{where}.output", "tool", self._rules)
                call_id = _required(item, "call_id", where)
                self._append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "item_reference":
                raise InvalidRequestError(f"{where}: send the item itself; {item.type} is not supported", where)
            case _:
                raise InvalidRequestError(
                    f"{where}.type: items of type {item.type[:100]!r} are not known here; there are messages, "
                    "reasoning, calls of functions and custom tools, and their outputs",
                    f"{where}.type",
                )

    def _add_message(self, item: InputItem, where: str, newest: bool) -> None:
        if item.role is None:
            path = f"{where}.role"
            raise InvalidRequestError(f"{path}: a message must have it, and every other item a type", path)
        _required(item, "content", where)
        content = _pieces(item.content, f"{where}.content", item.role, self._rules, newest=newest)
        if item.role == "assistant":
            self._add_text(content)
        elif item.role in _SYSTEM and len(self._messages) == 1 and self._messages[0]["role"] in _SYSTEM:
            self._messages[0]["content"] += ["\n\n", *content]
        else:
            self._append({"role": item.role, "content": content})

    def _append(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._answer = None

    def _begin_answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": None}
        self._messages.append(answer)
        self._answer = answer
        return answer

    def _add_thought(self, thought: str) -> None:
        if not thought:
            return
        answer = self._answer
        if answer is None or answer["content"] is not None or "tool_calls" in answer:
            answer = self._begin_answer()
        answer.setdefault("reasoning_content", []).append(thought)

    def _add_text(self, content: list[Piece]) -> None:
        answer = self._answer
        if answer is None or (answer["content"] is not None and "tool_calls" not in answer):
            answer = self._begin_answer()
        if answer["content"] is None:
            answer["content"] = []
        answer["content"] += content

    def _add_call(self, item: InputItem, arguments: str, where: str) -> None:
        answer = self._answer or self._begin_answer()
        function = {"name": full_name(item.namespace, _required(item, "name", where)), "arguments": arguments}
        call = {"id": _required(item, "call_id", where), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)

    def _thought(self, item: InputItem, where: str) -> str:
        """Return a reasoning item's text: its content, its encrypted content, or its summary."""
        if item.content:
            return self._text(item.content, f"{where}.content")
        if item.encrypted_content:
            thought = decode_thought(item.encrypted_content, f"{where}.encrypted_content")
            if thought is not None:
                return thought
        return self._text(item.summary, f"{where}.summary", "\n\n")

    def _text(self, parts: list[InputPart] | str | None, where: str, between: str = "") -> str:
        """Return the text of a thought, which cannot have images."""
        return between.join(map(str, _pieces(parts, where, "assistant", self._rules)))


def _required(item: InputItem, name: str, where: str) -> Any:
    """Return the item's field. Raises `InvalidRequestError` if it is missing."""
    value = getattr(item, name)
    if value is None:
        path = f"{where}.{name}"
        raise InvalidRequestError(f"{path}: an item of type {item.type or 'message'!r} must have it", path)
    return value
