"""A prompt as routing sees it: hashes of ever longer beginnings of its text, taken from a request's body as it came.

Nothing is tokenized, and messages are not decoded: a chat's next turn repeats the bytes of the last one and adds to
them, and that is all that is needed to find it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgspec

FIRST_BLOCK = 64  # bytes: about a KV page of 16 tokens
_GROWTH = 16  # a block is a 16th of what stands before it, so that megabytes have less than 200
_BYTES_PER_TOKEN = 4  # of text, roughly; of ids, as they are packed here, exactly


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The hashes of a prompt's beginnings. `keys[i]` stands for its first `ends[i]` tokens, of `tokens` in all.

    Tokens of text are estimated by its length.
    """

    keys: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    tokens: int = 0
    streamed: bool = False  # its answer comes as it is drawn
    keeper: str | None = None  # the replica that has what it goes on from


class _Body(msgspec.Struct):
    """The fields of a request that say which prompt it is. `Raw`: the bytes as the client wrote them."""

    messages: list[msgspec.Raw] | None = None
    input: list[msgspec.Raw] | str | None = None  # of a response
    system: msgspec.Raw | None = None
    instructions: msgspec.Raw | None = None
    tools: msgspec.Raw | None = None
    prompt: str | list[Any] | None = None
    input_ids: list[int] | None = None
    model: str | None = None  # or an adapter, whose pages are its own
    cache_salt: str | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_Body)


def prompt_of(body: bytes) -> Prompt:
    """The prompt of a request to any generating endpoint; without keys where the body is none that has one."""
    try:
        read = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt()  # the engine has the words for it
    prompt = _hashed(read)
    return msgspec.structs.replace(prompt, streamed=True) if read.stream else prompt


def _hashed(read: _Body) -> Prompt:
    apart = read.model or "", read.cache_salt or ""
    seed = "\x1e".join(apart).encode("utf-8", "replace") if any(apart) else b""
    said = [read.input.encode("utf-8", "replace")] if isinstance(read.input, str) else read.messages or read.input
    if said is not None:
        first = (read.tools, read.system, read.instructions)
        begin = b"\x1e".join(bytes(raw) for raw in first if raw is not None)
        return hashed(b"\x1e".join([begin, *map(bytes, said)]), seed)
    if read.input_ids is not None:
        return of_ids(read.input_ids, seed)
    if isinstance(read.prompt, str):
        return hashed(read.prompt.encode("utf-8", "replace"), seed)
    if isinstance(read.prompt, list) and read.prompt:
        one = read.prompt[0]  # several prompts go where the first one goes
        if isinstance(one, str):
            return hashed(one.encode("utf-8", "replace"), seed)
        return of_ids(one if isinstance(one, list) else read.prompt, seed)
    return Prompt()


def of_ids(token_ids: Iterable[int], seed: bytes = b"") -> Prompt:
    """The prompt of token ids; without keys where some of them cannot be ids."""
    try:
        return hashed(array("I", token_ids).tobytes(), seed)
    except (TypeError, OverflowError):
        return Prompt()


def hashed(text: bytes, seed: bytes = b"") -> Prompt:
    """The prompt of a text; `seed` keeps prompts apart that share nothing although they look alike."""
    chain = blake2b(seed, digest_size=8).digest()
    keys, ends = [], []
    for start, end in pairwise(_borders(len(text))):
        chain = blake2b(text[start:end], digest_size=8, key=chain).digest()
        keys.append(int.from_bytes(chain, "little"))
        ends.append(end // _BYTES_PER_TOKEN)
    return Prompt(tuple(keys), tuple(ends), -(-len(text) // _BYTES_PER_TOKEN))


def _borders(length: int) -> list[int]:
    """Where blocks end, in bytes: the same for every text, so that equal beginnings have equal blocks."""
    borders = [0]
    while (end := borders[-1] + max(FIRST_BLOCK, borders[-1] // _GROWTH)) <= length:
        borders.append(end)
    return borders
