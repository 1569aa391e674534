"""The bytes that each token id adds to the text, for tokenizers whose decoder looks at one token at a time.

Two families cover nearly every language model: byte-level (GPT-2, Llama 3, Qwen) and SentencePiece-like
(Metaspace, or Replace + ByteFallback + Fuse + Strip: Llama 2, Mistral, Gemma). For both, the text of a run of
tokens is the concatenation of the tokens' bytes, read as UTF-8; only the start of the text is special.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Rules(NamedTuple):
    """The rules by which one decoder turns a token into bytes, and what it does at the start of the text."""

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes] | None = None  # for the first token, where it differs
    lead: str = ""  # a character taken off the start of the text ...
    lead_count: int = 0  # ... at most this many times


def rules_of(decoder: object) -> Rules | None:
    """The rules of a decoder given as in tokenizer.json, None where tokens cannot be read one by one."""
    if not isinstance(decoder, Mapping):
        return None
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return Rules(_byte_level_piece)
    if kind == "Metaspace":
        return _metaspace(decoder)
    if kind == "Sequence":
        steps = [step for step in decoder.get("decoders", []) if isinstance(step, Mapping)]
        if [step.get("type") for step in steps] in (["ByteLevel"], ["Metaspace"]):
            return rules_of(steps[0])
        return _sentencepiece(steps)
    return None


def _metaspace(decoder: Mapping[str, object]) -> Rules:
    mark = str(decoder.get("replacement", "▁"))

    def piece(token: str) -> bytes:
        return token.replace(mark, " ").encode()

    def first_piece(token: str) -> bytes:
        return token.replace(mark, "").encode()

    prepended = decoder.get("prepend_scheme", "always") != "never"
    return Rules(piece, first_piece if prepended else None)


def _sentencepiece(steps: list[Mapping[str, object]]) -> Rules | None:
    """The rules of a decoder of Replace* ByteFallback? (Fuse (Strip at the start)?)? in this order; anything else is
    not known.
    """
    replacements: list[tuple[str, str]] = []
    rest = list(steps)
    while rest and rest[0].get("type") == "Replace":
        step = rest.pop(0)
        pattern = step.get("pattern")
        old = pattern.get("String") if isinstance(pattern, Mapping) else None
        new = step.get("content")
        if not isinstance(old, str) or not old or not isinstance(new, str):
            return None
        replacements.append((old, new))
    byte_fallback = bool(rest) and rest[0].get("type") == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    lead, lead_count = "", 0
    if [step.get("type") for step in rest] == ["Fuse", "Strip"]:
        content, start = rest[1].get("content"), rest[1].get("start")
        if not isinstance(content, str) or not isinstance(start, int) or rest[1].get("stop") != 0:
            return None
        lead, lead_count = content, start
    elif [step.get("type") for step in rest] not in ([], ["Fuse"]):
        return None

    def piece(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode()

    return Rules(piece, None, lead, lead_count)


# Byte-level vocabularies write the 188 printable Latin-1 bytes as themselves and the other 68 as the characters from
# U+0100 on, in order. `_TO_LATIN1` undoes that; what is not part of the alphabet becomes a character that Latin-1
# cannot encode, and such a token stands for its own UTF-8.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_TO_LATIN1 = dict.fromkeys(_OTHERS, 0xFFFF) | {0x100 + i: byte for i, byte in enumerate(_OTHERS)}


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


class PieceTable:
    """The pieces of a whole vocabulary, built once per tokenizer and shared by all its detokenizers.

    `shown` maps token ids to text where a token is valid UTF-8 by itself, `skipped` does so without special
    tokens; `partial` maps the remaining ids to bytes. Ids outside the vocabulary are in none.
    """

    __slots__ = ("_special", "_tokens", "partial", "rules", "shown", "skipped")

    def __init__(self, rules: Rules, tokens: Mapping[int, str], special: frozenset[int]) -> None:
        self.rules = rules
        self.shown: dict[int, str] = {}
        self.partial: dict[int, bytes] = {}
        for token_id, token in tokens.items():
            data = rules.piece(token)
            try:
                self.shown[token_id] = data.decode()
            except UnicodeDecodeError:
                self.partial[token_id] = data
        self.skipped = {token_id: text for token_id, text in self.shown.items() if token_id not in special}
        self._tokens = tokens
        self._special = special

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes after other tokens; none for ids outside the vocabulary."""
        text = self.shown.get(token_id)
        return self.partial.get(token_id, b"") if text is None else text.encode()

    def first_bytes(self, token_id: int, hidden: Set[int]) -> bytes | None:
        """A token's bytes at the very start of the text; None if it leaves no trace there."""
        token = self._tokens.get(token_id)
        if token is None or token_id in hidden:
            return None
        return (self.rules.first_piece or self.rules.piece)(token)

    def decode(self, token_ids: Iterable[int], skip_special: bool) -> str:
        """The text of all the ids at once; bytes that are not UTF-8 become U+FFFD."""
        remaining = iter(token_ids)
        hidden = self._special if skip_special else frozenset()
        written = bytearray()  # joined as it grows: joining a million pieces in one go would hold the GIL for 60 ms
        if self.rules.first_piece is not None:
            firsts = (self.first_bytes(token_id, hidden) for token_id in remaining)
            written += next((data for data in firsts if data is not None), b"")
        for token_id in remaining:
            if token_id not in hidden:
                written += self.bytes_of(token_id)
        text = written.decode("utf-8", "replace")
        return text[leading(text, self.rules.lead, self.rules.lead_count) :]


def leading(text: str, lead: str, count: int) -> int:
    """The number of the first `count` characters that are `lead`, counted up to the first that is not."""
    found = 0
    while found < count and text.startswith(lead, found):
        found += 1
    return found
