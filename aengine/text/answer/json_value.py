"""Finds the end of a JSON value in a text that comes in pieces."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_IN_OBJECT = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[ \t\r\n,}\]]")


class JsonValue:
    """Counts the open brackets and quotes of one value, whose first character tells its kind. Time is linear."""

    __slots__ = ("_depth", "_escaped", "_quoted", "_scalar")

    def __init__(self, first: str) -> None:
        self._depth = 0  # open braces and brackets
        self._quoted = self._escaped = False
        self._scalar = first not in '"{['

    @property
    def quoted(self) -> bool:
        """Whether what comes next is part of a string."""
        return self._quoted

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Read from a place in the text: where the part of it ends that belongs to the value, and whether that is the
        value's end.
        """
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            if self._scalar:
                found = _AFTER_SCALAR.search(text, at)
                return (len(text), False) if found is None else (found.start(), True)
            found = (_IN_STRING if self._quoted else _IN_OBJECT).search(text, at)
            if found is None:
                return len(text), False
            at = found.end()
            self._step(found[0])
            if not self._depth and not self._quoted:
                return at, True
        return at, False

    def _step(self, character: str) -> None:
        if self._quoted:
            self._escaped = character == "\\"
            self._quoted = self._escaped
        elif character == '"':
            self._quoted = True
        else:
            self._depth += 1 if character in "{[" else -1
