"""Keeps a chat template's control tokens apart from the same characters in messages.

Before rendering, a mark is put after every character of the messages that could begin a special token: "<" becomes "<"
+ mark. Marking works character by character, so it commutes with what templates do to text. A marked text splits,
trims, joins and compares like the plain one, if the text it is compared with is marked as well. After rendering, a
character whose mark would begin a special token becomes a stand-in. The tokenizer's normalizer turns it back after
special tokens have been recognised. All other marks are dropped.

A token whose first character the template writes is the template's, even if the rest comes from a message: templates do
write `<|{{ message.role }}|>`. The caller checks roles and tool names.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from aengine.errors import InvalidRequestError

# Rare symbols and ideographs. They are printable, so that `repr` and `tojson` do not escape them.
_MARKS = (range(0x1D300, 0x1D357), range(0x2801, 0x2900), range(0x20000, 0x2A6E0))
_NONCHARACTERS = range(0xFDD0, 0xFDF0)  # code points that Unicode reserves for use inside a program
_STAND_INS = 0x100000  # the first of the code points for stand-ins, in a private use area
_PLACEHOLDERS = 0xF0000  # likewise for placeholders
_SLICE = 2**17  # characters marked at once while the GIL is held; 5 ms


class ControlTokens:
    """The texts of a tokenizer's special tokens, and how to write them as plain text.

    stand_ins: maps the first characters of special tokens to texts that replace these characters. Clients cannot guess
    these texts. foreign: characters that are never used as marks.
    """

    def __init__(self, texts: Iterable[str], foreign: str = "") -> None:
        self._foreign = frozenset(foreign)
        self.texts = sorted({text for text in texts if text})
        firsts = sorted({text[0] for text in self.texts})
        nonce = "".join(chr(secrets.choice(_NONCHARACTERS)) for _ in range(8))
        self.stand_ins = {first: nonce + chr(_STAND_INS + index) for index, first in enumerate(firsts)}
        self._nonce = nonce
        # Letters and digits are everywhere, and templates trim blanks. These are marked only if a whole token follows.
        self._rare = [first for first in firsts if not _is_common(first)]
        patterns = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in self.texts if _is_common(text[0])]
        self._common = re.compile("|".join(patterns)) if patterns else None
        self.candidates = re.compile("|".join([*map(re.escape, self._rare), *patterns]) or "(?!)")
        # Leftmost and longest, as the tokenizer recognises them.
        self._wholes = re.compile("|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))) or "(?!)")
        self.beginnings = functools.lru_cache(maxsize=4)(self._beginnings)

    def placeholders(self, texts: Iterable[str]) -> dict[str, str]:
        """Return texts that stand for these special tokens within messages. The caller replaces them after rendering.

        They are never marked, and clients cannot guess them.
        """
        return {text: f"{self._nonce}{chr(_PLACEHOLDERS + self.texts.index(text))}" for text in texts}

    def plain(self, text: str) -> str:
        """Return a settled text with its stand-ins replaced by the characters they stand for."""
        for first, stand_in in self.stand_ins.items():
            text = text.replace(stand_in, first)
        return text

    def mark(self, text: str, mark: str) -> str:
        """Return the text with `mark` after every candidate. A million candidates take 20 ms."""
        if self._common is not None:  # first, while the characters after the candidates are unchanged
            text = self._common.sub(lambda match: match[0] + mark, text)
        for first in self._rare:
            if first in text:
                slices = (text[start : start + _SLICE] for start in range(0, len(text), _SLICE))
                text = "".join([part.replace(first, first + mark) for part in slices])
        return text

    def marker_for(self, *values: object) -> Marker | None:
        """Return a marker whose mark occurs in none of the JSON-like values; None if there is nothing to mark."""
        used = {*self._foreign, *self.stand_ins}
        found = False
        for text in _strings(values):
            found = found or self.candidates.search(text) is not None
            if not text.isascii():
                used.update(text)
        if not found:
            return None
        mark = next((mark for mark in map(chr, chain(*_MARKS)) if mark not in used), None)
        if mark is None:
            raise InvalidRequestError("the messages use every rare character that could mark them", "messages")
        return Marker(self, mark)

    def found_in(self, text: str) -> list[str]:
        """Return the special tokens in a text, in order."""
        return self._wholes.findall(text)

    def _beginnings(self, mark: str) -> re.Pattern[str]:
        """Return a pattern of marked characters with which a special token would begin.

        The other characters of the token may be marked or not.
        """
        rests: dict[str, list[str]] = {}
        for token in self.texts:
            rest = "".join(f"{re.escape(character)}{mark}?" for character in token[1:])
            rests.setdefault(token[0], []).append(rest)
        return re.compile(
            "|".join(f"{re.escape(first)}{mark}(?={'|'.join(either)})" for first, either in rests.items()) or "(?!)"
        )


class Marker:
    """Marks the texts of one rendering with one character."""

    def __init__(self, tokens: ControlTokens, mark: str) -> None:
        self.mark = mark
        self._tokens = tokens

    def mark_text(self, value: object) -> object:
        """Return a text, or the texts of a tuple, marked. Other values and marked texts are returned unchanged."""
        if isinstance(value, tuple):
            return tuple(map(self.mark_text, value))
        if not isinstance(value, str) or self.mark in value:
            return value
        return self._tokens.mark(value, self.mark)

    def mark_all(self, value: object) -> object:
        """Return JSON-like data with all texts marked. Keys are marked only if they hold a whole special token."""
        if isinstance(value, Mapping):
            return {self._mark_key(key): self.mark_all(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_all(item) for item in value]
        return self.mark_text(value)

    def alike(self, left: object, right: object) -> tuple[object, object]:
        """Return two values to compare: if one is marked, the other is marked as well."""
        if self._is_marked(left):
            return left, self._mark_items(right)
        if self._is_marked(right):
            return self.mark_text(left), right
        return left, right

    def unmark(self, text: str) -> str:
        """Drop the marks."""
        return text.replace(self.mark, "")

    def settle(self, text: str) -> tuple[str, bool]:
        """Return a rendered text without marks, and whether it has stand-ins."""
        stand_ins = self._tokens.stand_ins
        settled, count = self._tokens.beginnings(self.mark).subn(lambda match: stand_ins[match[0][0]], text)
        return self.unmark(settled), count > 0

    def _is_marked(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(isinstance(item, str) and self.mark in item for item in value)
        return isinstance(value, str) and self.mark in value

    def _mark_items(self, value: object) -> object:
        return [self.mark_text(item) for item in value] if isinstance(value, list) else self.mark_text(value)

    def _mark_key(self, key: str) -> object:
        return self.mark_text(key) if any(token in key for token in self._tokens.texts) else key


def _is_common(character: str) -> bool:
    return character.isalnum() or character.isspace()


def characters(value: object, most: int) -> int:
    """Count the characters of the texts in JSON-like data. The count stops at the first sum beyond `most`."""
    total = 0
    for text in _strings(value):
        total += len(text)
        if total > most:
            break
    return total


def _strings(value: object) -> Iterator[str]:
    """Yield all texts in JSON-like data, also the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value))
        yield from _strings(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
