"""Bounds the output and the time of a tokenizer, from the steps in its tokenizer.json.

The library has no limits of its own, and nothing stops a thread that tokenizes. Steps that can grow a text without
bound are refused when the file is read. Texts that may take long are never tokenized on the event loop. Texts with too
many tokens for the context are refused by their length alone.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from aengine.errors import CheckpointError
from aengine.text.tokens.pieces import PieceTable

MAX_OUTPUT = 2**25  # characters of a text after normalization, before it is cut into tokens
_MAX_GROWTH = 512  # characters that normalization may make of one character
_MAX_DECODED_GROWTH = 16  # the same for a token; lower, as the whole vocabulary is decoded
_MAX_ADDED = 64  # ids put around a text
_QUICK_GROWTH = 16  # byte-level tokenizers after NFC have 15

_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_GROWTH_BY_TYPE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12, "ByteLevel": 5}

# Alternatives of the patterns at which published tokenizers split. Each takes time linear in the text it matches.
_QUICK_PATTERNS = frozenset(
    r"""
(?i:'s|'t|'re|'ve|'m|'ll|'d)
(?i:'s|'t|'re|'ve|'m|'ll|'d)(?!\p{L})
's
't
're
've
'm
'll
'd
[^\r\n\p{L}\p{N}]?\p{L}+
[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+
[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+
[一-龥぀-ゟ゠-ヿ]+
[0-9][0-9][0-9]
[\r\n]
\p{N}
\p{N}+
\p{N}{1,3}
 ?\p{L}+
 ?\p{N}+
 ?[^\s\p{L}\p{N}]+
 ?[^\s\p{L}\p{N}]+[\r\n]*
 ?[^\s\p{L}\p{N}]+[\r\n/]*
 ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*
 ?[\p{P}\p{S}]+[\r\n]*
\s*[\r\n]+
\s*[\r\n]
\s+(?!\S)
\s+
 {2,}
""".splitlines()
)


class _CheckedParts(msgspec.Struct):
    """The parts of tokenizer.json that are checked."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def refuse_growth(path: Path, data: bytes) -> None:
    """Raise `CheckpointError` if the tokenizer could make too much of a text or of a token.

    data: the content of tokenizer.json.
    """
    try:
        described = msgspec.json.decode(data, type=_CheckedParts)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (msgspec.MsgspecError, RecursionError):  # the library reports the mistake
        return
    growth = _growth(described.normalizer) * _growth(described.pre_tokenizer)
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"{path}: its normalizer or pre_tokenizer can turn a character into {growth:g}; the limit is {_MAX_GROWTH}"
        )
    if (growth := _growth(described.decoder)) > _MAX_DECODED_GROWTH:
        raise CheckpointError(
            f"{path}: its decoder can turn a character into {growth:g}; the limit is {_MAX_DECODED_GROWTH}"
        )
    try:
        added = sum(map(_added_ids, _steps(described.post_processor)))
    except (TypeError, KeyError):
        raise CheckpointError(f"{path} is not a tokenizer: its post_processor has an unknown form") from None
    if added > _MAX_ADDED:
        raise CheckpointError(f"{path}: its post_processor adds {added:g} ids to a text; the limit is {_MAX_ADDED}")


def largest_growth(backend: Backend) -> float:
    """Return how many characters the tokenizer can make of one character before it cuts the text into tokens."""
    return _growth(_state(backend.normalizer)) * _growth(_state(backend.pre_tokenizer))


def is_quick(backend: Backend) -> bool:
    """Return whether a short text takes a short time: nothing grows much, and all patterns are known."""
    steps = [*_steps(_state(backend.normalizer)), *_steps(_state(backend.pre_tokenizer))]
    return largest_growth(backend) <= _QUICK_GROWTH and all(
        _QUICK_PATTERNS.issuperset(_alternatives(pattern)) for step in steps if (pattern := _pattern(step, "Regex"))
    )


def _state(component: Any) -> object:
    """Return a component as tokenizer.json writes it."""
    return None if component is None else json.loads(component.__getstate__())


def _steps(component: object) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a component, also those of nested sequences."""
    found = [component]
    while found:
        step = found.pop()
        if isinstance(step, Mapping):
            inner = next((step[name] for name in _PARTS if isinstance(step.get(name), list)), None)
            if inner is None:
                yield step
            else:
                found += inner


def _growth(component: object) -> float:
    growth = 1.0
    for step in _steps(component):
        growth = min(growth * _growth_of_step(step), 1e99)
    return growth


def _growth_of_step(step: Mapping[str, Any]) -> float:
    """Return how many characters the step can make of one character."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        text = _pattern(step, "String")
        # An expression or an empty text may match nothing, on both sides of each character.
        return max(1, -(-len(content) // len(text))) if text else 1 + 2 * len(content)
    if kind in ("Prepend", "Metaspace"):
        return 1 + len(str(step.get("prepend", "▁")))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    return _GROWTH_BY_TYPE.get(str(kind), 1)


def _longest_replacement(charsmap: object) -> float:
    """Return the length of the longest text in SentencePiece's table.

    The table consists of the size of a trie, the trie, and texts that end with a zero byte.
    """
    try:
        data = base64.b64decode(str(charsmap))
    except (binascii.Error, ValueError):
        return 1
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))


def _added_ids(step: Mapping[str, Any]) -> float:
    """Return how many ids a step of the post-processor puts around a text; infinity if the step repeats the text."""
    if step.get("type") in ("BertProcessing", "RobertaProcessing"):
        return 4
    known = step.get("special_tokens")
    sizes = {name: len(one["ids"]) for name, one in known.items()} if isinstance(known, Mapping) else {}
    most = 0.0
    for form in ("single", "pair"):
        pieces = step.get(form, ())
        texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
        added = sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in pieces if "SpecialToken" in piece)
        most = max(most, added if len(texts) == len(set(texts)) else float("inf"))
    return most


def _pattern(step: Mapping[str, Any], kind: str) -> str:
    """Return the text or the regular expression that a step searches for; empty if there is none."""
    pattern = step.get("pattern")
    found = pattern.get(kind) if isinstance(pattern, Mapping) else None
    return found if isinstance(found, str) else ""


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression, split at bars outside of groups and classes."""
    found, begin, depth, in_class, at = [], 0, 0, False, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif character == "[":
            in_class = True
        elif character == "]":
            in_class = False
        elif not in_class:
            depth += (character == "(") - (character == ")")
            if character == "|" and not depth:
                found.append(pattern[begin:at])
                begin = at + 1
        at += 1
    return [*found, pattern[begin:]]


# These steps leave ASCII alone. Of other texts they keep at least one byte for two characters: at worst, Unicode's
# compositions make two bytes of three characters.
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Prepend"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}
_UTF8_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]


def longest_token_bytes(backend: Backend, pieces: PieceTable | None) -> int | None:
    """Return the number of bytes of the longest token.

    Returns None if the tokenizer may drop or fuse characters. A text's length then says nothing about its tokens.
    """
    if pieces is None or not isinstance(backend.model, BPE):
        return None
    tokens = pieces.distinct
    before = list(_steps(_state(backend.pre_tokenizer)))
    in_bytes = backend.model.byte_fallback or any(step["type"] == "ByteLevel" for step in before)
    if not in_bytes or not all(bytes([byte]) in tokens for byte in _UTF8_BYTES):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # these tokens contain any number of blanks
    if not all(step["type"] in _NORMALIZERS or _replaces_one(step) for step in _steps(_state(backend.normalizer))):
        return None
    if not all(step["type"] in _PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in before):
        return None
    return max(map(len, tokens))


def minimum_tokens(text: str, longest: int) -> int:
    """Return the least number of tokens that the text can have, if a token has at most `longest` bytes."""
    size = len(text) if text.isascii() else len(text) // 2
    return -(-size // longest)


def _replaces_one(step: Mapping[str, Any]) -> bool:
    """Return whether the step only replaces single characters."""
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"] != ""
