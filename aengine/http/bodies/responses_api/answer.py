"""The answers of `/v1/responses`, as the OpenAPI schema describes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aengine.http.bodies.responses import CandidateWithTop
from aengine.http.bodies.responses_api.request import TextConfig
from aengine.http.bodies.responses_api.tools import ResponsesTool, ResponsesToolChoice

Status = Literal["in_progress", "completed", "incomplete"]


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
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The thought, as content or as a summary. `encrypted_content` is the same in base64, where it was asked for."""

    id: str
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType | None = msgspec.UNSET


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET  # where the tool stands in one
    arguments: str  # JSON


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int  # 0: what is cached costs nothing


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
    reason: Literal["max_output_tokens"] | None  # None: it was aborted


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses` that does not stream."""

    id: str
    object: Literal["response"]
    created_at: int  # unix seconds
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
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
