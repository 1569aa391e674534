"""The table of formats, and which one a checkpoint's chat template speaks of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from aengine.text.answer.formats.base import CallFormat
from aengine.text.answer.formats.hermes import Hermes
from aengine.text.answer.formats.llama3 import Llama3

FormatName = Literal["hermes", "llama3"]

# Those with the most particular marks first.
FORMATS: Mapping[FormatName, CallFormat] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
}
_FOREIGN = ("<function=", "<arg_key>", "[TOOL_CALLS]")


def call_format_of(templates: Iterable[str]) -> FormatName | None:
    """The format that chat templates speak of; None where they know no tools, or another way to call them."""
    text = "\n".join(templates)
    if any(mark in text for mark in _FOREIGN):
        return None
    return next((name for name, form in FORMATS.items() if form.detect(text)), None)
