"""Tells a chat template's own control tokens from the same characters in somebody's message.

Before rendering, a mark is put behind every character of the messages that could begin a special token
("<" becomes "<" + mark). Marking is character by character, so it commutes with what templates do to text: a marked
text splits, trims, joins and compares as the plain one does, provided that what is searched for is marked alike.
After rendering, a mark that would begin a special token turns its character into a stand-in, which the
tokenizer's normalizer turns back once special tokens have been recognised; all other marks are dropped.

A token whose first character the template writes is the template's, whatever the rest of it is made of: templates
do write `<|{{ message.role }}|>`. Roles and tool names are for the caller to check.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from aengine.errors import InvalidRequestError

# Rare symbols and ideographs: printable, so that `repr` and `tojson` leave them as they are.
_MARKS = (range(0x1D300, 0x1D357), range(0x2801, 0x2900), range(0x20000, 0x2A6E0))
_NONCHARACTERS = range(0xFDD0, 0xFDF0)  # code points that Unicode keeps for use inside a program
_STAND_INS = 0x100000  # and up: private use
_SLICE = 2**17  # characters marked at once, while the interpreter is held; 5 ms


class ControlTokens:
    """The texts of a tokenizer's special tokens, and how they can be written as plain text.

    `stand_ins` maps their first characters to what takes those characters' place; nobody outside can guess it.
    No mark is a character of `foreign`.
    """

    def __init__(self, texts: Iterable[str], foreign: str = "") -> None:
        self._foreign = frozenset(foreign)
        self.texts = sorted({text for text in texts if text})
        firsts = sorted({text[0] for text in self.texts})
        nonce = "".join(chr(secrets.choice(_NONCHARACTERS)) for _ in range(8))
        self.stand_ins = {first: nonce + chr(_STAND_INS + index) for index, first in enumerate(firsts)}
        # Letters and digits are everywhere, and templates trim blanks: those are marked only in front of a whole token.
        self._rare = [first for first in firsts if not _is_common(first)]
        patterns = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in self.texts if _is_common(text[0])]
        self._common = re.compile("|".join(patterns)) if patterns else None
        self.candidates = re.compile("|".join([*map(re.escape, self._rare), *patterns]) or "(?!)")
        # Leftmost and longest, as the tokenizer recognises them.
        self._wholes = re.compile("|".join(map(re.escape, sorted(self.texts, key=len, reverse=True))) or "(?!)")
        self.beginnings = functools.lru_cache(maxsize=4)(self._beginnings)

    def plain(self, text: str) -> str:
        """A settled text with the characters that its stand-ins stand for."""
        for first, stand_in in self.stand_ins.items():
            text = text.replace(stand_in, first)
        return text

    def mark(self, text: str, mark: str) -> str:
        """The text with `mark` behind every candidate. A text of nothing else takes 20 ms a million."""
        if self._common is not None:  # first: what stands behind them is still as it was
            text = self._common.sub(lambda match: match[0] + mark, text)
        for first in self._rare:
            if first in text:
                slices = (text[start : start + _SLICE] for start in range(0, len(text), _SLICE))
                text = "".join([part.replace(first, first + mark) for part in slices])
        return text

    def marker_for(self, *values: object) -> Marker | None:
        """A marker whose mark occurs in none of the JSON-like values; None where there is nothing to mark."""
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
            raise InvalidRequestError("the messages use every rare character there is", "messages")
        return Marker(self, mark)

    def found_in(self, text: str) -> list[str]:
        """The special tokens in a text, in order."""
        return self._wholes.findall(text)

    def _beginnings(self, mark: str) -> re.Pattern[str]:
        """Finds a marked character with which a special token would begin, whatever else of it is marked."""
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
        """A text marked, or the texts of a tuple; anything else, and what is marked already, as it is."""
        if isinstance(value, tuple):
            return tuple(map(self.mark_text, value))
        if not isinstance(value, str) or self.mark in value:
            return value
        return self._tokens.mark(value, self.mark)

    def mark_all(self, value: object) -> object:
        """All texts in JSON-like data marked; keys only where they hold a whole special token."""
        if isinstance(value, Mapping):
            return {self._mark_key(key): self.mark_all(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_all(item) for item in value]
        return self.mark_text(value)

    def alike(self, left: object, right: object) -> tuple[object, object]:
        """Two values for a comparison, with the plain one marked if the other is."""
        if self._is_marked(left):
            return left, self._mark_items(right)
        if self._is_marked(right):
            return self.mark_text(left), right
        return left, right

    def unmark(self, text: str) -> str:
        """Drop the marks."""
        return text.replace(self.mark, "")

    def settle(self, text: str) -> tuple[str, bool]:
        """A rendered text without marks, and whether there are stand-ins in it for what would begin special tokens."""
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
    """How many characters the texts in JSON-like data have, or the first sum of them beyond `most`."""
    total = 0
    for text in _strings(value):
        total += len(text)
        if total > most:
            break
    return total


def _strings(value: object) -> Iterator[str]:
    """All texts in JSON-like data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value))
        yield from _strings(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
