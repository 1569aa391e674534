"""Combines fragments: merges them if a reader is behind, or collects them into a finished answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from aengine.errors import EngineFailedError
from aengine.http.engine_like import StreamLike
from aengine.types import Choice, Completion, FinishReason, Fragment, TokenLogprob, Usage, join_calls

SLICE = 64  # items handled in one iteration of the loop; 2 ms for tokens with 20 candidates


def merge(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Return one fragment for each choice, ordered by each choice's last fragment, so that usage stays at the end."""
    by_choice: dict[int, list[Fragment]] = {}
    for fragment in fragments:
        pieces = by_choice.pop(fragment.index, [])
        pieces.append(fragment)
        by_choice[fragment.index] = pieces
    return [_joined(pieces) for pieces in by_choice.values()]


def _joined(pieces: list[Fragment]) -> Fragment:
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return Fragment(
        "".join(piece.text for piece in pieces),
        tuple(token_id for piece in pieces for token_id in piece.token_ids),
        _joined_logprobs(pieces),
        last.finish_reason,
        last.usage,
        last.index,
        pieces[0].prompt_logprobs,
        last.stop_string,
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
    )


def _joined_logprobs(pieces: list[Fragment]) -> tuple[TokenLogprob, ...] | None:
    if all(piece.logprobs is None for piece in pieces):
        return None
    return tuple(logprob for piece in pieces for logprob in piece.logprobs or ())


async def collect(stream: StreamLike) -> Completion:
    """Read a stream to its end. Raises the request's error, or `EngineFailedError` if it ended without usage."""
    by_choice: dict[int, list[Fragment]] = {}
    usage: Usage | None = None
    while usage is None and (fragments := await stream.take()):
        for fragment in fragments:
            by_choice.setdefault(fragment.index, []).append(fragment)
        usage = fragments[-1].usage
    if usage is None:
        raise EngineFailedError("the request was aborted")
    choices = []
    for index in sorted(by_choice):
        choices.append(_choice(by_choice.pop(index)))
        await asyncio.sleep(0)
    return Completion(stream.id, tuple(choices), usage)


def _choice(pieces: list[Fragment]) -> Choice:
    whole = _joined(pieces)
    reason: FinishReason = whole.finish_reason or "abort"
    return Choice(
        whole.index,
        whole.text,
        whole.token_ids,
        reason,
        whole.logprobs,
        whole.prompt_logprobs,
        whole.stop_string,
        whole.reasoning,
        join_calls(whole.tool_calls),
    )


def sliced(fragments: Sequence[Fragment]) -> Iterator[Sequence[Fragment]]:
    """Yield runs of at most `SLICE` fragments, with at most about `2 * SLICE` fragments and logprobs together."""
    start = size = 0
    for place, fragment in enumerate(fragments):
        own = 1 + len(fragment.logprobs or ()) + len(fragment.prompt_logprobs or ())
        if place > start and (place - start == SLICE or size + own > 2 * SLICE):
            yield fragments[start:place]
            start, size = place, 0
        size += own
    yield fragments[start:]
