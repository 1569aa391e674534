"""Request bodies. Unknown fields are ignored, `null` means "not given", ranges are the engine's to check."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aengine.http.chat_structs import ChatMessage, Tool, ToolChoice
from aengine.http.structured import ResponseFormat, StructuredOutputs, asked_structured
from aengine.types import SamplingParams

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Sampling(msgspec.Struct, kw_only=True):
    """The fields of `SamplingParams` that every endpoint takes under the same name and with the same meaning."""

    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int, float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    shown_special_ids: list[Int] | None = None
    n: Int | None = None

    def params(self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """What was given, over `defaults`. `max_tokens` is the endpoint's own default, `logprobs` its reading."""
        given: dict[str, Any] = {}
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                given[name] = tuple(value) if isinstance(value, list) else value
        if self.max_tokens is None:
            given["max_tokens"] = max_tokens
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        return msgspec.structs.replace(defaults, **given, logprobs=logprobs)


_SAMPLING_FIELDS = Sampling.__struct_fields__


class StructuredSampling(Sampling, kw_only=True):
    """And what the output must match."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def params(self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        guided = {name: getattr(self, name) for name in _GUIDED_FIELDS}
        structured = asked_structured(self.response_format, self.structured_outputs, guided)
        params = super().params(defaults, max_tokens=max_tokens, logprobs=logprobs)
        return params if structured is None else msgspec.structs.replace(params, structured=structured)


_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class GenerateRequest(StructuredSampling):
    """`POST /generate`. Exactly one of `prompt`, `input_ids` and `messages`."""

    prompt: str | list[Int] | None = None
    input_ids: list[Int] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None  # for the chat template
    chat_template_kwargs: dict[str, Any] | None = None
    fill_context: bool | None = None  # without max_tokens: on until the context is full
    logprobs: Int | None = None
    stream: bool | None = None  # None: true
    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class CompletionRequest(StructuredSampling):
    """`POST /v1/completions`."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = None


class ChatRequest(StructuredSampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = None
