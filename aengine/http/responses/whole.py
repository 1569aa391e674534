"""The body of a response that is not streamed."""

from __future__ import annotations

from typing import Any

from aengine.http.responses.answer import ResponseHead, ending_of, usage_body
from aengine.http.responses.items import MessageItem, Output
from aengine.text.answer.deltas import ContentDelta
from aengine.text.answer.reader import Reader
from aengine.types import Completion


async def response_body(head: ResponseHead, completion: Completion, output: Output, reader: Reader) -> dict[str, Any]:
    """The whole response: the same items as in a stream's last event."""
    choice = completion.choices[0]
    for delta in await reader.read(choice):
        output.add(delta)
    ending = ending_of(choice.finish_reason)
    rest = ContentDelta("", reader.take_logprobs())
    if isinstance(output.last, MessageItem) or (ending.status == "completed" and output.says_nothing):
        output.add(rest)
    if output.last is not None:
        output.last.end()
    for item in output.items:
        item.status = "completed" if ending.status == "completed" or item is not output.last else "incomplete"
    return head.body(ending, output.bodies(), usage_body(completion.usage, reader.thought_tokens))
