"""The bodies of Anthropic's Messages API: requests, and answers as the OpenAPI document describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aengine.http.fields.messages import WrittenName
from aengine.http.fields.sampling import Count, Probability, StopStrings, Temperature, TopK
from aengine.http.fields.unknown import REFUSED_WITH_PROMPTS, RequestBody, Unsupported


class BlockSource(msgspec.Struct, kw_only=True):
    """The source of an image, of type `base64` or `url`. `file` is refused, because no files are kept."""

    type: str | None = None
    media_type: str | None = None  # without effect: the image's own bytes say it
    data: str | None = None  # of type base64
    url: str | None = None  # of type url: fetched if the server's knob `image_url_hosts` allows


class ResultPart(msgspec.Struct, kw_only=True):
    """A part of a tool's result or of a system prompt. Its type is `text`, or in a result `image`."""

    type: str
    text: str | None = None
    source: BlockSource | str | None = None  # of an image


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of a message.

    Its type is `text`, `image`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`; other types are refused.
    The required fields depend on the type.
    """

    type: str
    text: str | None = None
    source: BlockSource | str | None = None  # of an image
    thinking: str | None = None
    id: str | None = None
    name: WrittenName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


# `(?!\n)`: Python's `$` alone would allow a line break at the end.
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$(?!\n)")]


class InputTool(msgspec.Struct, kw_only=True):
    """A tool of the client. Tools that Anthropic defines (with another `type` than `custom`) are refused."""

    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # arguments follow the schema even if the call is not forced
    type: str | None = None


class InputToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool, with type `tool`
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Count | None = None  # accepted without effect
    display: str | None = None  # "omitted" hides the thought; anything else shows it


class JsonOutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    # For the chat template, as `reasoning_effort`.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


_REFUSED: Mapping[str, Unsupported] = {
    "thread": Unsupported("conversations are not kept here; send all messages", (False,)),
    "mcp_servers": Unsupported("MCP servers are not called; send their tools as tools", ([],)),
    "container": Unsupported("nothing is executed here", ({},)),
    "compaction": Unsupported("not supported; ask for a summary in a message"),
}


class CountTokensRequest(RequestBody, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields that determine the prompt."""

    refused: ClassVar[Mapping[str, Unsupported]] = _REFUSED

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=100_000)]
    system: str | list[ResultPart] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=1024)] | None = None
    tool_choice: InputToolChoice | None = None  # None: auto
    thinking: ThinkingConfig | None = None  # None: the chat template decides
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # the older place of output_config.format


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    refused: ClassVar[Mapping[str, Unsupported]] = {**REFUSED_WITH_PROMPTS, **_REFUSED}
    refuses_other_fields: ClassVar[bool] = True

    max_tokens: Count  # 0: the prompt is computed and cached, nothing is generated
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    # aengine's own:
    cache_salt: str | None = None  # requests with different salts share no cached prefix
    speculation: bool | None = None  # false: no token is drafted ahead for this request


CountTokensRequest.ignored = frozenset(MessagesRequest.__struct_fields__)  # fields that only affect the answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt without and with a cached prefix, and tokens of the answer including thoughts."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages` that does not stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int
