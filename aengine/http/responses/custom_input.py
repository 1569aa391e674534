"""Decodes the text in `{"input": "..."}`, the arguments of a custom tool, while the model writes them."""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Complete characters and escapes of a JSON string. A high surrogate waits for the next escape.
_WHOLE = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=\\[^u])|(?!\\|\Z)))*"
)
_LONGEST_ESCAPE = 12  # characters: a surrogate pair
_LONE = re.compile("[\ud800-\udfff]")
_LONGEST_HEAD = 256  # characters


class CustomInput:
    """The input of one call. If the arguments are not `{"input": "..."}`, they are the input, unchanged."""

    __slots__ = ("_held", "_state")

    def __init__(self) -> None:
        self._held = ""  # an incomplete beginning of the object, or an incomplete escape
        self._state = "head"

    def feed(self, arguments: str) -> str:
        """Decode more of the arguments. Return the further input that is complete now."""
        text, self._held = self._held + arguments, ""
        if self._state == "head":
            found = _HEAD.match(text)
            if found is None:
                if len(text) <= _LONGEST_HEAD and _may_begin(text):
                    self._held = text
                    return ""
                self._state = "raw"
            else:
                self._state, text = "text", text[found.end() :]
        if self._state == "raw":
            return text
        if self._state == "over":
            return ""
        pieces, at = [], 0
        while at < len(text):
            whole = _WHOLE.match(text, at)
            end = at if whole is None else whole.end()
            pieces.append(_decoded(text[at:end]))
            at = end
            if text[at : at + 1] == '"':
                self._state = "over"
                break
            if len(text) - at < _LONGEST_ESCAPE:
                self._held = text[at:]
                break
            pieces.append(text[at])  # an invalid escape
            at += 1
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back, if the arguments are incomplete or have another form."""
        text, self._held = self._held, ""
        return text if self._state == "head" and text.strip() not in ("", "{", "{}") else ""


def _may_begin(text: str) -> bool:
    """Whether the text may be the beginning of the object."""
    rest = "".join(text.split())
    return '{"input":"'.startswith(rest) or rest == "{}"


def _decoded(text: str) -> str:
    try:
        decoded = str(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an invalid escape
        return text
    return _LONE.sub("\ufffd", decoded)
