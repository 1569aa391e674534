"""Whole answers of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aengine.http.openai.chunks import call_body, delta_body, finish_reason
from aengine.http.openai.logprobs import ChatLogprobs, CompletionForm, usage_body
from aengine.http.streams.prompt_logprobs import PromptLogprobsOf
from aengine.text.answer.deltas import Answer, ReasoningDelta
from aengine.text.reading.answer_reading import ChoiceReader
from aengine.types import Choice, Completion, is_cut


async def completion_body(
    head: dict[str, Any], completion: Completion, prompt_logprobs_of: PromptLogprobsOf, form: CompletionForm
) -> object:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": await form.logprobs(choice.index).encoded_body(choice.logprobs, len(choice.text)),
            "finish_reason": choice.finish_reason,
            **form.ids_of_prompt(choice.index),
            **({} if form.prompt_ids is None else {"token_ids": choice.token_ids}),
            **prompt_logprobs_of(choice.index),
        }
        for choice in completion.choices
    ]
    return {**head, "choices": choices, "usage": usage_body(completion.usage)}


async def chat_body(
    head: dict[str, Any],
    completion: Completion,
    readers: Sequence[ChoiceReader],
    logprobs: ChatLogprobs | None,
    prompt_ids: Sequence[int] | None = None,
) -> object:
    """The whole body of an answer that is not streamed. prompt_ids: where token ids are asked for."""
    choices = [await _choice_body(choice, readers[choice.index], logprobs) for choice in completion.choices]
    if prompt_ids is not None:
        head = {**head, "prompt_token_ids": prompt_ids}
        for body, choice in zip(choices, completion.choices, strict=True):
            body["token_ids"] = choice.token_ids
    usage = usage_body(completion.usage, sum(reader.thought_tokens for reader in readers))
    return {**head, "choices": choices, "usage": usage}


async def _choice_body(choice: Choice, reader: ChoiceReader, logprobs: ChatLogprobs | None) -> dict[str, Any]:
    parser = reader.parser
    await reader.count_thought(choice.token_ids)
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if not parser.plain:
        message |= _message_body(parser.read(choice.text, cut=is_cut(choice)))
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if logprobs is None else await logprobs.encoded_body(choice.logprobs),
        "finish_reason": finish_reason(choice.finish_reason, parser),
    }


def _message_body(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = {"content": answer.content or None}
    if answer.reasoning:
        body |= delta_body(ReasoningDelta(answer.reasoning))
    if answer.calls:
        body["tool_calls"] = [call_body(call) for call in answer.calls]
    return body
