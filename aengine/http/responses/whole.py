"""The body of a response that is not streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from aengine.http.responses.answer import ResponseHead, ending_of, usage_body
from aengine.http.responses.items import CallItem, Item, MessageItem, Output
from aengine.http.responses.logprobs import MessageLogprobs, by_token
from aengine.text.answer.deltas import ContentDelta, Delta
from aengine.text.answer.parser import AnswerParser
from aengine.text.reading.answer_reading import ChoiceReader
from aengine.types import Completion, is_cut

_CHARACTERS = 4096  # that are parsed between two turns of the loop
_TOKENS = 1024  # that are counted
_LOGPROBS = 64  # that are encoded


async def response_body(
    head: ResponseHead, completion: Completion, output: Output, reader: ChoiceReader, logprobs: MessageLogprobs | None
) -> dict[str, Any]:
    """The whole response: the same items as in a stream's last event."""
    choice, parser, thought = completion.choices[0], reader.parser, reader.thought
    if logprobs is not None:
        for place, (one, piece) in enumerate(by_token(choice.text, choice.logprobs or ())):
            logprobs.feed((one.token_id,), (one,))
            _add(output, _read(parser, piece), logprobs)
            if place % _LOGPROBS == 0:
                await asyncio.sleep(0)
    else:
        for start in range(0, len(choice.token_ids), _TOKENS):
            if thought is None or thought.over:
                break
            thought.feed(choice.token_ids[start : start + _TOKENS])
            await asyncio.sleep(0)
        for piece in [choice.text] if parser.plain else _pieces(choice.text):
            _add(output, _read(parser, piece), None)
            await asyncio.sleep(0)
    if not parser.plain:
        _add(output, parser.finish(cut=is_cut(choice)), logprobs)
    ending = ending_of(choice.finish_reason)
    if ending.status == "completed" and output.says_nothing:
        _add(output, [ContentDelta("")], logprobs)
    _end(output.last, logprobs)
    for item in output.items:
        item.status = "completed" if ending.status == "completed" or item is not output.last else "incomplete"
    return head.body(ending, output.bodies(), usage_body(completion.usage, reader.thought_tokens))


def _read(parser: AnswerParser, text: str) -> list[Delta]:
    if not parser.plain:
        return parser.feed(text)
    return [ContentDelta(text)] if text else []


def _pieces(text: str) -> Iterator[str]:
    for at in range(0, len(text), _CHARACTERS):
        yield text[at : at + _CHARACTERS]


def _add(output: Output, deltas: list[Delta], logprobs: MessageLogprobs | None) -> None:
    for delta in deltas:
        item = output.last
        if item is None or not item.continues(delta):
            if logprobs is not None and not isinstance(delta, ContentDelta):
                logprobs.drop()
            _end(item, logprobs)
            if logprobs is not None and isinstance(item, CallItem):
                logprobs.drop(but_last=True)
            item = output.begin(delta)
        if item.add(delta) and logprobs is not None and isinstance(item, MessageItem):
            logprobs.take()


def _end(item: Item | None, logprobs: MessageLogprobs | None) -> None:
    if item is not None:
        item.end()
    if isinstance(item, MessageItem) and logprobs is not None:
        item.logprobs = logprobs.end()
