"""The keys of a prompt: hashes of its prefixes, each longer than the one before, made from a request's raw body.

Nothing is tokenized, and messages are not decoded. The next turn of a chat repeats the bytes of the last turn and adds
new ones, which is enough to find its prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgspec

FIRST_BLOCK = 64  # bytes: about a KV page of 16 tokens
_GROWTH = 16  # a block is a 16th of the bytes before it, so that a megabyte has fewer than 200 blocks
_BYTES_PER_TOKEN = 4  # roughly for text, exactly for token ids, which are packed as 32 bits


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The keys of a prompt. `keys[i]` stands for its first `ends[i]` tokens; it has `tokens` in total.

    Token counts of text are estimated from its length.
    """

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    tokens: int = 0
    streamed: bool = False  # whether the answer is streamed
    keeper: str | None = None  # the replica that keeps the response that this request continues


class _Body(msgspec.Struct):
    """The fields of a request that define its prompt. `Raw` holds the bytes that the client sent."""

    messages: list[msgspec.Raw] | None = None
    input: list[msgspec.Raw] | str | None = None  # of /v1/responses
    system: msgspec.Raw | None = None
    instructions: msgspec.Raw | None = None
    tools: msgspec.Raw | None = None
    prompt: str | list[Any] | None = None
    input_ids: list[int] | None = None
    model: str | None = None  # perhaps an adapter, which has pages of its own
    cache_salt: str | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_Body)


def read_prompt(body: bytes) -> Prompt:
    """Return the prompt of a request to any generating endpoint; it has no keys if the body has no prompt."""
    try:
        read = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt()  # the engine will refuse it
    prompt = _prompt_from_body(read)
    return msgspec.structs.replace(prompt, streamed=True) if read.stream else prompt


def _prompt_from_body(read: _Body) -> Prompt:
    spaces = read.model or "", read.cache_salt or ""
    seed = "\x1e".join(spaces).encode("utf-8", "replace") if any(spaces) else b""
    messages = [read.input.encode("utf-8", "replace")] if isinstance(read.input, str) else read.messages or read.input
    if messages is not None:
        first = (read.tools, read.system, read.instructions)
        begin = b"\x1e".join(bytes(raw) for raw in first if raw is not None)
        return prompt_from_text(b"\x1e".join([begin, *map(bytes, messages)]), seed)
    if read.input_ids is not None:
        return prompt_from_ids(read.input_ids, seed)
    if isinstance(read.prompt, str):
        return prompt_from_text(read.prompt.encode("utf-8", "replace"), seed)
    if isinstance(read.prompt, list) and read.prompt:
        one = read.prompt[0]  # the first of several prompts decides
        if isinstance(one, str):
            return prompt_from_text(one.encode("utf-8", "replace"), seed)
        return prompt_from_ids(one if isinstance(one, list) else read.prompt, seed)
    return Prompt()


def prompt_from_ids(token_ids: Iterable[int], seed: bytes = b"") -> Prompt:
    """Return the prompt of token ids; it has no keys if some cannot be ids."""
    try:
        return prompt_from_text(array("I", token_ids).tobytes(), seed)
    except (TypeError, OverflowError):
        return Prompt()


def prompt_from_text(text: bytes, seed: bytes = b"") -> Prompt:
    """Return the prompt of a text. Prompts with different seeds share no keys."""
    chain = blake2b(seed, digest_size=8).digest()
    keys, ends = [], []
    for start, end in pairwise(_borders(len(text))):
        chain = blake2b(text[start:end], digest_size=8, key=chain).digest()
        keys.append(int.from_bytes(chain, "little"))
        ends.append(end // _BYTES_PER_TOKEN)
    return Prompt(tuple(keys), tuple(ends), -(-len(text) // _BYTES_PER_TOKEN))


def _borders(length: int) -> list[int]:
    """Return where blocks end, in bytes. The borders are the same for every text: equal prefixes have equal blocks."""
    borders = [0]
    while (end := borders[-1] + max(FIRST_BLOCK, borders[-1] // _GROWTH)) <= length:
        borders.append(end)
    return borders
