"""Bodies of answers."""

from __future__ import annotations

import msgspec


class Tokenized(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as the vocabulary writes them


class Detokenized(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    prompt: str


class Aborted(msgspec.Struct, frozen=True):
    """`POST /abort`."""

    aborted: int  # requests


class Flushed(msgspec.Struct, frozen=True):
    """`POST /flush_cache`."""

    flushed: bool = True
