"""How models write calls of tools: the formats that are known, and which one a checkpoint was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

CallFormat = Literal["hermes", "llama3"]


class CallSyntax(msgspec.Struct, frozen=True):
    """A call is a JSON object with a name and arguments, between markers."""

    begin: str
    end: str  # empty: the object's own last brace
    arguments: str  # the arguments' key as the model was trained on it; either of both is understood
    bare: bool  # an answer may begin with a call's object, without the marker
    separator: str  # between calls


SYNTAXES: dict[CallFormat, CallSyntax] = {
    # Hermes 2 and 3, Qwen 2.5 and 3
    "hermes": CallSyntax("<tool_call>", "</tool_call>", "arguments", bare=False, separator="\n"),
    # Llama 3.1 to 3.3
    "llama3": CallSyntax("<|python_tag|>", "", "parameters", bare=True, separator="; "),
}
ARGUMENT_KEYS = frozenset(syntax.arguments for syntax in SYNTAXES.values())

# Formats that share a marker or a key with one of the above, and are something else.
_RIVALS = ("<function=", "<arg_key>", "[TOOL_CALLS]")


def call_format_of(templates: Iterable[str]) -> CallFormat | None:
    """The format that chat templates speak of; None where they know no tools, or another way to call them."""
    text = "\n".join(templates)
    if any(rival in text for rival in _RIVALS):
        return None
    if "<tool_call>" in text:
        return "hermes"
    if "<|python_tag|>" in text or ('{"name": ' in text and '"parameters": ' in text):
        return "llama3"
    return None
