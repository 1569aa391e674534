"""Converts strings without quotes to JSON."""

from __future__ import annotations

import json

from aengine.text.answer.formats.values.python_literal import WORDS, LiteralReader
from aengine.text.answer.formats.values.schemas import Kind, kind_of

WORD_KINDS: dict[str, Kind] = {word: "null" if value == "null" else "boolean" for word, value in WORDS.items()}
BEGINNINGS: dict[Kind, str] = {"number": "-0123456789", "integer": "-0123456789", "array": "[", "object": "{"}


class RawText:
    """Converts a value, given in any pieces, to JSON of one of its kinds.

    A string is passed on as it comes. A value that may be something else is converted as a whole. trimmed: one line
    break on either side does not belong to the value.
    """

    __slots__ = ("_begun", "_held", "_kinds", "_starts", "_trimmed", "_whole", "_words")

    def __init__(self, kinds: frozenset[Kind], *, trimmed: bool = True) -> None:
        self._trimmed = trimmed
        self._kinds = kinds
        self._starts = "".join(BEGINNINGS.get(kind, "") for kind in kinds)
        self._words = [word for word, kind in WORD_KINDS.items() if kind in kinds]
        self._begun = not trimmed  # whether a line break at the start has come or can no longer come
        self._held = ""  # a line break that may be the last one
        self._whole: list[str] | None = []  # all text so far, unless it is known to be a string

    def feed(self, text: str) -> str:
        """Return the new JSON that is certain."""
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        if not text:
            return ""
        text, self._held = self._held + text, ""
        if text.endswith("\n"):
            text, self._held = text[:-1], "\n"
        if self._whole is None:
            return _inner(text)
        self._whole.append(text)
        if not self._is_string():
            return ""
        begun, self._whole = "".join(self._whole), None
        return f'"{_inner(begun)}'

    def finish(self, closed: bool = True) -> str:
        """Return the rest of the JSON, once the value is complete.

        closed: its own tag ends the value. A line break before another tag does not belong to the value.
        """
        end = self._held if closed and not self._trimmed else ""
        if self._whole is None:
            return f'{_inner(end)}"'
        return as_json("".join([*self._whole, end]), self._kinds)

    def _is_string(self) -> bool:
        """Return whether the value can only be a string."""
        if "string" not in self._kinds or self._whole is None:
            return False
        if self._kinds == {"string"}:
            return True
        begun = "".join(self._whole[:8])
        return bool(begun) and begun[0] not in self._starts and not any(word.startswith(begun) for word in self._words)


def as_json(text: str, kinds: frozenset[Kind]) -> str:
    """Convert a whole value to JSON of one of the kinds if possible, else to a string.

    If no kind is a string, blanks around the value are ignored, and the client must refuse JSON of another kind.
    """
    mixed = "string" in kinds
    stripped = text if mixed else text.strip()
    if stripped in WORDS and (not mixed or WORD_KINDS[stripped] in kinds):
        return WORDS[stripped]
    if not mixed or stripped[:1] in "-0123456789[{":
        value = _json_of(stripped)
        if value is not None and (not mixed or _has_kind(value, kinds)):
            return value
    return json.dumps(text, ensure_ascii=False)


def _json_of(text: str) -> str | None:
    """Convert text that is JSON or a Python literal to JSON; None if it is neither."""
    try:
        json.loads(text, parse_constant=refuse_constant)
        return text
    except (ValueError, RecursionError):
        pass
    reader = LiteralReader()
    rest = text[reader.feed(text) :]
    reader.end()
    return reader.take() if reader.done and not rest.strip() else None


def _has_kind(value: str, kinds: frozenset[Kind]) -> bool:
    try:
        kind = kind_of(json.loads(value))
    except (ValueError, RecursionError):
        return False
    return kind in kinds or (kind == "integer" and "number" in kinds)


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python's reader of JSON accepts."""
    raise ValueError(f"{constant} is not JSON")


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
