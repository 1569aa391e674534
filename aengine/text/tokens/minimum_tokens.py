"""Bounds a text's number of tokens from below by its length: what cannot fit is refused without tokenizing it.

No token stands for more bytes than the longest, and BPE over bytes, or with bytes to fall back on, leaves nothing out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from aengine.text.tokens.pieces import PieceTable

# What these make of a text that is not ASCII has at least one byte for two of its characters (Unicode's compositions:
# three characters become two bytes at the worst); ASCII they leave alone.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Prepend"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}
_UTF8_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]


def longest_token_bytes(backend: Backend, pieces: PieceTable | None) -> int | None:
    """The bytes of the longest token; None where a text may lose characters or have them fused, so that its length says
    nothing.
    """
    if pieces is None or not isinstance(backend.model, BPE):
        return None
    tokens = pieces.distinct
    before = list(_steps(backend.pre_tokenizer))
    in_bytes = backend.model.byte_fallback or any(step["type"] == "ByteLevel" for step in before)
    if not in_bytes or not all(bytes([byte]) in tokens for byte in _UTF8_BYTES):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # they swallow any number of blanks
    if not all(step["type"] in _NORMALIZERS or _replaces_one(step) for step in _steps(backend.normalizer)):
        return None
    if not all(step["type"] in _PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in before):
        return None
    return max(map(len, tokens))


def minimum_tokens(text: str, longest: int) -> int:
    """The least number of tokens of at most `longest` bytes that the text can have."""
    size = len(text) if text.isascii() else len(text) // 2
    return -(-size // longest)


def _replaces_one(step: Mapping[str, Any]) -> bool:
    """Whether the step only replaces single characters."""
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"] != ""


def _steps(component: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as tokenizer.json writes them."""
    found = [] if component is None else [json.loads(component.__getstate__())]
    while found:
        step = found.pop()
        parts = step.get("normalizers", step.get("pretokenizers"))
        if parts is None:
            yield step
        else:
            found += parts
