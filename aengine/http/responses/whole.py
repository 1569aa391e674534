"""The body of a response that is not streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from aengine.http.responses.head import ResponseHead, ending_of, usage_body
from aengine.http.responses.items import CallItem, MessageItem, Output
from aengine.http.responses.logprobs import MessageLogprobs
from aengine.text.answer.deltas import ContentDelta, Delta
from aengine.text.reading.answer_reading import ChoiceReader
from aengine.types import Completion, is_cut

_CHARACTERS = 4096  # that are parsed between two turns of the loop
_TOKENS = 1024  # that are counted


async def response_body(
    head: ResponseHead, completion: Completion, output: Output, reader: ChoiceReader, logprobs: MessageLogprobs | None
) -> dict[str, Any]:
    """The whole response: the same items as in a stream's last event."""
    choice, parser, thought = completion.choices[0], reader.parser, reader.thought
    if logprobs is None and thought is not None:
        for start in range(0, len(choice.token_ids), _TOKENS):
            if thought.over:
                break
            thought.feed(choice.token_ids[start : start + _TOKENS])
            await asyncio.sleep(0)
    if parser.plain:
        _add(output, [ContentDelta(choice.text)] if choice.text else [])
    else:
        for piece in _pieces(choice.text):
            _add(output, parser.feed(piece))
            await asyncio.sleep(0)
        _add(output, parser.finish(cut=is_cut(choice)))
    ending = ending_of(choice.finish_reason)
    if ending.status == "completed" and output.says_nothing:
        _add(output, [ContentDelta("")])
    for item in output.items:
        item.end()
        item.status = "completed" if ending.status == "completed" or item is not output.last else "incomplete"
    if logprobs is not None:
        message = next((item for item in output.items if isinstance(item, MessageItem)), None)
        called = any(isinstance(item, CallItem) for item in output.items)
        characters = len(message.text) if message is not None and called else None
        told = await logprobs.whole(choice.token_ids, choice.logprobs or (), characters)
        if message is not None:
            message.logprobs = told
    return head.body(ending, output.bodies(), usage_body(completion.usage, reader.thought_tokens))


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), _CHARACTERS):
        yield text[at : at + _CHARACTERS]


def _add(output: Output, deltas: list[Delta]) -> None:
    for delta in deltas:
        item = output.last
        if item is None or not item.continues(delta):
            item = output.begin(delta)
        item.add(delta)
