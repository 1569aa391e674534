"""The bodies of requests to Anthropic's Messages API. What is done about further fields stands in `unsupported`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aengine.http.bodies.chat import WrittenName
from aengine.http.bodies.requests import Count, Probability, StopStrings, Temperature, TopK


class ResultPart(msgspec.Struct, kw_only=True):
    """A part of a tool's result, or of a system prompt. All types but `text` are refused, with a sentence."""

    type: str
    text: str | None = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of a message. The fields that it must have are those of its type: `text`, `thinking`,
    `redacted_thinking`, `tool_use` or `tool_result`; all others are refused, with a sentence.
    """

    type: str
    text: str | None = None
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


# No line break at the end either, which Python's `$` alone would let pass.
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$(?!\n)")]


class InputTool(msgspec.Struct, kw_only=True):
    """A tool of the client's own. One that Anthropic defines (another `type` than `custom`) is refused."""

    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # a call that the model makes by itself has arguments of this schema as well
    type: str | None = None


class InputToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of type `tool`
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Count | None = None  # taken, not used
    display: str | None = None  # "omitted": the thought stays away; anything else shows it


class JsonOutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # for the chat template, by its name
    format: JsonOutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: what a prompt is made of."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=100_000)]
    system: str | list[ResultPart] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=1024)] | None = None
    tool_choice: InputToolChoice | None = None  # None: auto
    thinking: ThinkingConfig | None = None  # None: as the chat template has it
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # the older place of output_config.format
    model: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count  # 0: the prompt is computed and cached, nothing is generated
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    cache_salt: str | None = None  # our own: requests with different ones share no cached prefix
