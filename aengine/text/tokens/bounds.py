"""Bounds what a tokenizer makes of a text, and how long that takes."""

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

MAX_OUTPUT = 2**25  # characters that a text may become before it is cut into tokens
_MAX_GROWTH = 512  # characters that one may become
_MAX_DECODED_GROWTH = 16  # the same of a token: all of the vocabulary is decoded
_MAX_ADDED = 64  # ids put around a text
_QUICK_GROWTH = 16  # of byte-level tokenizers behind NFC: 15

_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
_ALPHABETS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12, "ByteLevel": 5}

# Alternatives of the patterns that published tokenizers split at. Each takes a time that is linear in what it matches.
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


class _Described(msgspec.Struct):
    """The parts of tokenizer.json that are looked at."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def refuse_growth(path: Path, text: str) -> None:
    """Raise `CheckpointError` if the tokenizer that the text of tokenizer.json describes could make too much of a text
    or of a token.
    """
    try:
        described = msgspec.json.decode(text, type=_Described)
    except (msgspec.MsgspecError, RecursionError):  # the library says what is wrong with it
        return
    growth = _growth(described.normalizer) * _growth(described.pre_tokenizer)
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"{path}: its normalizer or pre_tokenizer can make {growth:g} characters of one, at most {_MAX_GROWTH} are "
            "taken"
        )
    if (growth := _growth(described.decoder)) > _MAX_DECODED_GROWTH:
        raise CheckpointError(
            f"{path}: its decoder can make {growth:g} characters of one, at most {_MAX_DECODED_GROWTH} are taken"
        )
    try:
        added = sum(map(_added, _steps(described.post_processor)))
    except (TypeError, KeyError):
        raise CheckpointError(f"{path} is not a tokenizer: its post_processor has an unknown form") from None
    if added > _MAX_ADDED:
        raise CheckpointError(
            f"{path}: its post_processor adds {added:g} ids to a text, at most {_MAX_ADDED} are taken"
        )


def largest_growth(backend: Backend) -> float:
    """Return how many characters the tokenizer can make of one, before it cuts the text into tokens."""
    return _growth(_state(backend.normalizer)) * _growth(_state(backend.pre_tokenizer))


def is_quick(backend: Backend) -> bool:
    """Whether a short text takes a short time: nothing can grow much, and all patterns are known ones."""
    steps = [*_steps(_state(backend.normalizer)), *_steps(_state(backend.pre_tokenizer))]
    return largest_growth(backend) <= _QUICK_GROWTH and all(
        _QUICK_PATTERNS.issuperset(_alternatives(pattern)) for step in steps if (pattern := _pattern(step, "Regex"))
    )


def _state(component: Any) -> object:
    """A component as tokenizer.json writes it."""
    return None if component is None else json.loads(component.__getstate__())


def _steps(component: object) -> Iterator[Mapping[str, Any]]:
    """The steps of a component, those of sequences within it taken apart."""
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
    """How many characters the step can make of one."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        text = _pattern(step, "String")
        # An expression or an empty text may match nothing, on both sides of each character.
        return max(1, -(-len(content) // len(text))) if text else 1 + 2 * len(content)
    if kind in ("Prepend", "Metaspace"):
        return 1 + len(str(step.get("prepend", "▁")))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    return _ALPHABETS.get(str(kind), 1)


def _longest_replacement(charsmap: object) -> float:
    """The longest text in SentencePiece's table: the size of a trie, the trie, and texts that end with a zero byte."""
    try:
        data = base64.b64decode(str(charsmap))
    except (binascii.Error, ValueError):
        return 1
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))


def _added(step: Mapping[str, Any]) -> float:
    """How many ids a step of the post-processor puts around a text; infinity if it repeats the text."""
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
    """The text or the regular expression that a step looks for; empty if there is none."""
    pattern = step.get("pattern")
    found = pattern.get(kind) if isinstance(pattern, Mapping) else None
    return found if isinstance(found, str) else ""


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a regular expression, split at bars outside of groups and classes."""
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
    before = list(_steps(_state(backend.pre_tokenizer)))
    in_bytes = backend.model.byte_fallback or any(step["type"] == "ByteLevel" for step in before)
    if not in_bytes or not all(bytes([byte]) in tokens for byte in _UTF8_BYTES):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # they swallow any number of blanks
    if not all(step["type"] in _NORMALIZERS or _replaces_one(step) for step in _steps(_state(backend.normalizer))):
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
