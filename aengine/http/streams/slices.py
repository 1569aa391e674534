"""Encodes long answers a slice at a time: the loop turns in between, and nothing of them is in memory twice."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from aengine.types import Fragment

SLICE = 64  # items between two turns of the loop; 2 ms where each is a token with 20 candidates

T = TypeVar("T")


class EncodedList:
    """A list as JSON, in pieces that follow one another; a document may hold it several times."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces


async def encoded_list(items: Sequence[T], body_of: Callable[[T], object], slice_size: int = SLICE) -> EncodedList:
    """A list of `body_of` each item, encoded as JSON a slice at a time."""
    pieces = [b"["]
    for start in range(0, len(items), slice_size):
        encoded = msgspec.json.encode([body_of(item) for item in items[start : start + slice_size]])
        pieces.append(encoded[1:-1] if not start else b"," + encoded[1:-1])
        await asyncio.sleep(0)
    pieces.append(b"]")
    return EncodedList(pieces)


def document(payload: object) -> list[bytes]:
    """The payload as JSON, in pieces: encoded lists in it are not copied."""
    hole = secrets.token_hex(16)  # nobody can have written it into a text
    lists: list[EncodedList] = []

    def leave_out(value: object) -> str:
        if not isinstance(value, EncodedList):
            raise TypeError(f"{type(value).__name__} in a document")
        lists.append(value)
        return hole

    head, *rest = msgspec.json.encode(payload, enc_hook=leave_out).split(b'"%b"' % hole.encode())
    pieces = [head]
    for one, after in zip(lists, rest, strict=True):
        pieces += [*one.pieces, after]
    return pieces


def sliced(fragments: Sequence[Fragment]) -> Iterator[Sequence[Fragment]]:
    """The fragments in runs of at most `SLICE`, and of as many tokens with logprobs unless one alone has more."""
    start = size = 0
    for place, fragment in enumerate(fragments):
        own = 1 + len(fragment.logprobs or ()) + len(fragment.prompt_logprobs or ())
        if place > start and (place - start == SLICE or size + own > 2 * SLICE):
            yield fragments[start:place]
            start, size = place, 0
        size += own
    yield fragments[start:]
