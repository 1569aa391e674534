"""Request bodies. Unknown fields are ignored, `null` means "not given", ranges are the engine's to check."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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


class GenerateRequest(Sampling):
    """`POST /generate`. Exactly one of `prompt` and `input_ids`."""

    prompt: str | list[Int] | None = None
    input_ids: list[Int] | None = None
    logprobs: Int | None = None
    stream: bool | None = None  # None: true
    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = None


class TextPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message, as the chat template gets it: text parts joined, `developer` read as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    model: str | None = None
    priority: Int = 0
    cache_salt: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`. Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # None: true
    add_special_tokens: bool | None = None  # None: true for a prompt, false for messages
    return_token_strs: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[Int]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """`POST /abort`."""

    request_id: Annotated[str, Meta(min_length=1)]
