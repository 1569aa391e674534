"""Locates values in a body that JSON cannot represent: NaN, infinities, lone surrogates, bytes that are not UTF-8.

Python's `json` writes the first three without an error, so some clients send them. The parser reports only a byte
offset; here the field's name is found.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_LONGEST = 2**16  # bytes; parsing a longer body a second time would take milliseconds


class Unencodable(NamedTuple):
    """A value that JSON cannot represent.

    path: the field's path, such as `messages[0].content`; empty for the whole body.
    """

    path: str
    reason: str


class _Constant(NamedTuple):
    name: str


def find_unencodable(body: bytes | bytearray) -> Unencodable | None:
    """Return a value that JSON cannot represent, in a body that the parser refused; None if there is no such value."""
    if len(body) > _LONGEST:
        return None
    try:
        # Bytes that are not UTF-8 become lone surrogates, like escapes of lone surrogates.
        value = json.loads(body.decode("utf-8", "surrogateescape"), parse_constant=_Constant)
    except (ValueError, RecursionError):
        return None
    found = [_Item(None, "", value)]
    while found:
        item = found.pop()
        value = item.value
        if isinstance(value, _Constant):
            return Unencodable(item.path(), f"JSON has no {value.name}")
        if isinstance(value, dict):
            if not all(map(_is_text, value)):
                return Unencodable(item.path(), "the name of a field is not valid Unicode")
            found += [_Item(item, f".{name}", below) for name, below in value.items()]
        elif isinstance(value, list):
            found += [_Item(item, f"[{index}]", below) for index, below in enumerate(value)]
        elif isinstance(value, str) and not _is_text(value):
            reason = "the text is not valid Unicode (a lone surrogate, or bytes that are not UTF-8)"
            return Unencodable(item.path(), reason)
    return None


class _Item(NamedTuple):
    """A value and its place. Its path is built only if it is reported, because names may be long."""

    parent: _Item | None
    step: str
    value: Any

    def path(self) -> str:
        steps, item = [], self
        while item.parent is not None:
            steps.append(item.step)
            item = item.parent
        return "".join(reversed(steps)).removeprefix(".")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text) if not text.isascii() else True
