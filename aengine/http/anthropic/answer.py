"""The parts of an answer in Anthropic's format: blocks, stop reason and usage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from aengine.errors import EngineFailedError
from aengine.http.anthropic.bodies import (
    AnswerBlock,
    MessageBody,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta
from aengine.text.answer.reader import Reader
from aengine.types import Choice, Completion, Fragment, Usage

# Clients send the signature back with a thought. It is not checked here.
SIGNATURE = "unsigned"
_UNREADABLE = "INVALID_JSON"  # Anthropic's name for arguments that are not a JSON object

_input_decoder = msgspec.json.Decoder(dict[str, Any])


class AnswerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of an answer that are known before it begins.

    max_tokens: the request's; with 0 no text is shown.
    """

    id: str
    model: str
    max_tokens: int
    shows_thoughts: bool

    def message(self, content: list[AnswerBlock], usage: MessageUsage) -> MessageBody:
        return MessageBody(
            id=self.id, model=self.model, content=content, stop_reason=None, stop_sequence=None, usage=usage
        )

    def usage(self, usage: Usage, thinking_tokens: int) -> MessageUsage:
        return MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=min(usage.completion_tokens, self.max_tokens),
            output_tokens_details=OutputTokensDetails(min(thinking_tokens, self.max_tokens)),
        )

    def stop_reason(self, last: Fragment | Choice, usage: Usage, has_calls: bool) -> StopReason:
        """Return the stop reason. Raises `EngineFailedError` for an aborted answer, for which the API has no reason."""
        if self.max_tokens == 0:
            return "max_tokens"
        match last.finish_reason:
            case "stop" if last.stop_string is not None:
                return "stop_sequence"
            case "stop":
                return "tool_use" if has_calls else "end_turn"
            case "length":
                full = usage.completion_tokens < self.max_tokens
                return "model_context_window_exceeded" if full else "max_tokens"
        raise EngineFailedError("the request was aborted")


async def message_body(plan: AnswerPlan, completion: Completion, reader: Reader) -> MessageBody:
    """Return the body of an answer that is not streamed."""
    choice, usage = completion.choices[0], completion.usage
    deltas = await reader.read(choice) if plan.max_tokens else []
    message = plan.message(content_blocks(deltas, plan.shows_thoughts), plan.usage(usage, reader.thought_tokens))
    reason = plan.stop_reason(choice, usage, reader.ends_with_calls)
    stop_sequence = choice.stop_string if reason == "stop_sequence" else None
    return msgspec.structs.replace(message, stop_reason=reason, stop_sequence=stop_sequence)


def begins_block(delta: Delta, previous: Delta | None) -> bool:
    """Whether the delta begins a block."""
    return type(delta) is not type(previous) or (isinstance(delta, CallDelta) and delta.id is not None)


def content_blocks(deltas: Iterable[Delta], shows_thoughts: bool) -> list[AnswerBlock]:
    """Return the blocks of a whole answer."""
    runs: list[list[Delta]] = []
    for delta in deltas:
        if begins_block(delta, runs[-1][-1] if runs else None):
            runs.append([])
        runs[-1].append(delta)
    return [_block(run, shows_thoughts) for run in runs]


def _block(run: list[Delta], shows_thoughts: bool) -> AnswerBlock:
    first = run[0]
    text = "".join(delta.arguments if isinstance(delta, CallDelta) else delta.text for delta in run)
    if isinstance(first, ContentDelta):
        return TextBlock(text)
    if isinstance(first, CallDelta):
        return ToolUseBlock(first.id or "", first.name or "", _input(text))
    return ThinkingBlock(text if shows_thoughts else "", SIGNATURE)


def _input(arguments: str) -> dict[str, Any]:
    try:
        return _input_decoder.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):  # the model wrote invalid JSON, or the answer was cut short
        return {_UNREADABLE: arguments}
