"""The items of a conversation: messages, thoughts, calls of tools and what these gave."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.errors import InvalidRequestError
from aengine.http.bodies.chat import WrittenName
from aengine.http.bodies.left_out import left_out

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content. All types but those of texts and `refusal` are refused, with a sentence."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item that a request sends: its fields depend on its type, which a message need not have.

    What an answer brought is sent back as it came; fields that change nothing (`status`, `phase`, ...) are passed over.
    """

    type: str | None = None
    id: str | None = None
    # a message
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None  # a thought's as well
    # a call of a tool, and what it gave
    call_id: str | None = None
    name: WrittenName | None = None
    namespace: WrittenName | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    # a thought
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


def joined_text(
    content: str | list[InputPart] | None, where: str, between: str = "", *, may_leave_out: bool = False
) -> str:
    """The text of an item's content. Raises `InvalidRequestError`, naming the part that is none, unless images may be
    left out.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        if may_leave_out and (instead := left_out(part.type)) is not None:
            texts.append(instead)
            continue
        if part.type not in (*_TEXTS, "refusal"):
            raise InvalidRequestError(f"{path}.type: this model reads text only, not {part.type!r}", f"{path}.type")
        name = "refusal" if part.type == "refusal" else "text"
        text: str | None = getattr(part, name)
        if text is None:
            raise InvalidRequestError(f"{path}.{name}: a part of type {part.type!r} must have it", f"{path}.{name}")
        texts.append(text)
    return between.join(texts)
