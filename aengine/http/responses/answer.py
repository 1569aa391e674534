"""The structs of `/v1/responses`' answers for the OpenAPI document, and the response object."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import msgspec

from aengine.http.openai.bodies import CandidateWithTop
from aengine.http.responses.bodies import (
    Reasoning,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    TextConfig,
    TextFormat,
)
from aengine.requests.sampling_params import SamplingParams
from aengine.types import FinishReason, Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = ItemStatus | Literal["failed"]


class OutputText(msgspec.Struct, frozen=True):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[CandidateWithTop]


class SummaryText(msgspec.Struct, frozen=True):
    type: Literal["summary_text"]
    text: str


class ReasoningText(msgspec.Struct, frozen=True):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The thought, as content or as a summary. `encrypted_content` is the thought in base64, if it was requested."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType | None = msgspec.UNSET


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET  # if the tool is in a namespace
    arguments: str  # JSON


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int  # always 0: writing to the cache is free


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] | None  # None: aborted


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses` that does not stream."""

    id: str
    object: Literal["response"]
    created_at: int  # unix seconds
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool  # whether it is kept
    temperature: float
    text: TextConfig
    tool_choice: ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct, frozen=True):
    """`DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, frozen=True):
    """`GET /v1/responses/{response_id}/input_items`."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct, frozen=True):
    """`POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Ending(NamedTuple):
    """How an answer ended."""

    status: Status
    incomplete: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def ending_of(reason: FinishReason | None) -> Ending:
    """Return the ending for a finish reason. reason: None if the stream ended without one."""
    match reason:
        case "stop":
            return Ending("completed")
        case "length":
            return Ending("incomplete", incomplete={"reason": "max_output_tokens"})
        case "abort" | None:
            return Ending("incomplete", incomplete={"reason": None})
        case "error":
            return Ending("failed", error={"code": "server_error", "message": "the answer could not be finished"})


class ResponseHead:
    """The fields of a response that stay the same in all its events."""

    def __init__(
        self, response_id: str, model: str, body: ResponsesRequest, params: SamplingParams, *, stored: bool
    ) -> None:
        text, reasoning = body.text or TextConfig(), body.reasoning or Reasoning()
        self.id = response_id
        self._begin: dict[str, Any] = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._end: dict[str, Any] = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": stored,
            "temperature": params.temperature,
            "text": TextConfig(format=text.format or TextFormat(type="text"), verbosity=text.verbosity),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def body(self, ending: Ending, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        """Return the response object in its present state."""
        return {
            **self._begin,
            "completed_at": int(time.time()) if ending.status == "completed" else None,
            "status": ending.status,
            "error": ending.error,
            "incomplete_details": ending.incomplete,
            "output": output,
            "usage": usage,
            **self._end,
        }


def usage_body(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """Return the `usage` of a response. No tokens count as written to the cache, because writing is free."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
