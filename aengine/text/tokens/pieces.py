"""The bytes that each token id adds to the text, for tokenizers whose decoder reads one token at a time.

Two families cover nearly every language model. Byte-level: GPT-2, Llama 3, Qwen. SentencePiece-like (Metaspace, or
Replace + ByteFallback + Fuse + Strip): Llama 2, Mistral, Gemma. For both, the text of a run of tokens is the
concatenation of the tokens' bytes, read as UTF-8. Only the start of the text is special.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Rules(NamedTuple):
    """How one decoder turns a token into bytes, and what it does at the start of the text."""

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes] | None = None  # for the first token, if that differs
    lead: str = ""  # a character stripped from the start of the text ...
    lead_count: int = 0  # ... at most this many times
    pieces: Callable[[Sequence[str]], Iterable[bytes]] | None = (
        None  # `piece` of a whole vocabulary, if there is a faster way
    )


def rules_of(decoder: object) -> Rules | None:
    """Return the rules of a decoder as tokenizer.json writes it; None if tokens cannot be read one by one."""
    if not isinstance(decoder, Mapping):
        return None
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return Rules(_byte_level_piece, pieces=_byte_level_pieces)
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
    """Return the rules of a decoder `Replace* ByteFallback? (Fuse (Strip at the start)?)?`, in this order.

    Returns None for any other order.
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
# U+0100 on, in order. `_TO_LATIN1` reverts that. Characters outside this alphabet become one that Latin-1 cannot
# encode; a token with such a character stands for its own UTF-8.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_TO_LATIN1 = dict.fromkeys(_OTHERS, 0xFFFF) | {0x100 + i: byte for i, byte in enumerate(_OTHERS)}


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


# The byte of each code point; -1 if it has none. All code points beyond the table share its last place.
_BYTE_OF = np.full(0x100 + len(_OTHERS) + 1, -1, dtype=np.int16)
_BYTE_OF[_PRINTABLE] = _PRINTABLE
_BYTE_OF[0x100:-1] = _OTHERS


def _byte_level_pieces(tokens: Sequence[str]) -> list[bytes]:
    """Return `_byte_level_piece` of each token, looked up at once."""
    codes = np.frombuffer("".join(tokens).encode("utf-32-le"), dtype="<u4")
    values = _BYTE_OF[np.minimum(codes, len(_BYTE_OF) - 1)]
    data, ends = values.astype(np.uint8).tobytes(), np.cumsum([len(token) for token in tokens], dtype=np.int64)
    pieces = [data[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]
    for foreign in set(np.searchsorted(ends, np.flatnonzero(values < 0), "right").tolist()):
        pieces[foreign] = tokens[foreign].encode()
    return pieces


class PieceTable:
    """The pieces of a whole vocabulary, built once per tokenizer and shared by all its detokenizers.

    shown: token ids to text, if a token is valid UTF-8 by itself. skipped: `shown` without special tokens. partial: the
    remaining ids to bytes. Ids outside the vocabulary are in none of them.
    """

    __slots__ = ("_special", "_tokens", "partial", "rules", "shown", "skipped")

    def __init__(self, rules: Rules, tokens: Mapping[int, str], special: frozenset[int]) -> None:
        self.rules = rules
        self.shown: dict[int, str] = {}
        self.partial: dict[int, bytes] = {}
        texts = list(tokens.values())
        pieces = map(rules.piece, texts) if rules.pieces is None else rules.pieces(texts)
        for token_id, data in zip(tokens, pieces, strict=True):
            text = data.decode("utf-8", "replace")  # faster than an exception for each of a hundred thousand tokens
            if "\ufffd" in text and text.encode() != data:
                self.partial[token_id] = data
            else:
                self.shown[token_id] = text
        self.skipped = {token_id: text for token_id, text in self.shown.items() if token_id not in special}
        self._tokens = tokens
        self._special = special

    @property
    def distinct(self) -> set[bytes]:
        """The bytes of all tokens."""
        return {*map(str.encode, self.shown.values()), *self.partial.values()}

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes after other tokens; none for ids outside the vocabulary."""
        text = self.shown.get(token_id)
        return self.partial.get(token_id, b"") if text is None else text.encode()

    def first_bytes(self, token_id: int, hidden: Set[int]) -> bytes | None:
        """Return a token's bytes at the very start of the text; None if the token adds nothing there."""
        token = self._tokens.get(token_id)
        if token is None or token_id in hidden:
            return None
        return (self.rules.first_piece or self.rules.piece)(token)

    def decode(self, token_ids: Iterable[int], skip_special: bool) -> str:
        """Return the text of all ids. Bytes that are not UTF-8 become U+FFFD."""
        remaining = iter(token_ids)
        hidden = self._special if skip_special else frozenset()
        written = bytearray()  # grows piece by piece: joining a million pieces at once would hold the GIL for 60 ms
        if self.rules.first_piece is not None:
            firsts = (self.first_bytes(token_id, hidden) for token_id in remaining)
            written += next((data for data in firsts if data is not None), b"")
        for token_id in remaining:
            if token_id not in hidden:
                written += self.bytes_of(token_id)
        text = written.decode("utf-8", "replace")
        return text[leading(text, self.rules.lead, self.rules.lead_count) :]


def leading(text: str, lead: str, count: int) -> int:
    """Return how many of the first `count` characters are `lead`, up to the first that is not."""
    found = 0
    while found < count and text.startswith(lead, found):
        found += 1
    return found
