"""The bodies of requests. `null` means "not given"; what is done about unknown fields stands in `unsupported`.

The engine checks the ranges of sampling parameters (`SamplingParams.validate`); here they serve the schema alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, TypedDict

import msgspec
from msgspec import Meta

from aengine.errors import InvalidRequestError
from aengine.http.bodies.chat import ChatMessage, Tool, ToolChoice
from aengine.http.bodies.structured import ResponseFormat, StructuredOutputs, single_form
from aengine.requests.sampling_params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from aengine.requests.structured import Structured


def _range(**schema: int | float) -> Meta:
    """A range in the schema alone: the engine refuses what is outside in better words than the parser's."""
    return Meta(extra_json_schema=schema)


Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(le=2**63 - 1, extra_json_schema={"minimum": 0})]
TokenId = Count
Logprobs = Annotated[int, _range(minimum=0, maximum=MAX_LOGPROBS)]
Penalty = Annotated[float, _range(minimum=-2, maximum=2)]
StopString = Annotated[str, _range(minLength=1, maxLength=MAX_STOP_LENGTH)]
UnstoppedEnd = Annotated[str, _range(maxLength=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], _range(maxItems=MAX_STOP_STRINGS)]
Temperature = Annotated[float, _range(minimum=0, maximum=2)]
TopK = Annotated[int, Meta(le=2**63 - 1, extra_json_schema={"minimum": -1})]
Probability = Annotated[float, _range(exclusiveMinimum=0, maximum=1)]
Tools = Annotated[list[Tool], Meta(max_length=128)]
BadWord = Annotated[str, _range(minLength=1, maxLength=MAX_BAD_WORD_LENGTH)]
Bias = Annotated[float, _range(minimum=-100, maximum=100)]


class Drawing(msgspec.Struct, kw_only=True):
    """The fields that every generating endpoint takes under the same name and with the same meaning."""

    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, _range(minimum=0, maximum=1)] | None = None
    repetition_penalty: Annotated[float, _range(exclusiveMinimum=0, maximum=10000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[Int, Bias], _range(maxProperties=MAX_LOGIT_BIAS)] | None = None
    seed: Int | None = None
    stop: StopString | StopStrings | None = None
    stop_in_thought: bool | None = None
    unstopped: Annotated[list[UnstoppedEnd], _range(minItems=2, maxItems=2)] | None = None
    stop_token_ids: Annotated[list[TokenId], _range(maxItems=MAX_LOGIT_BIAS)] | None = None
    bad_words: Annotated[list[BadWord], _range(maxItems=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], _range(minItems=1)] | None = None
    include_stop: bool | None = None
    include_stop_str_in_output: bool | None = None  # another name of include_stop
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    shown_special_ids: Annotated[list[TokenId], _range(maxItems=MAX_LOGIT_BIAS)] | None = None
    model: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None  # taken, not used

    def params(
        self,
        defaults: SamplingParams,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        structured: Structured | None = None,
    ) -> SamplingParams:
        """The request's sampling parameters over `defaults`.

        `max_tokens` is the endpoint's own default, where the request has no field of that name; `logprobs` and
        `structured` are the endpoint's readings.
        """
        fields: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name, None)
            if value is not None:
                fields[name] = tuple(value) if isinstance(value, list) else value
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        if self.include_stop_str_in_output:
            fields["include_stop"] = True
        forms = {}
        for name in _FORM_FIELDS:
            if (form := getattr(self, name, None)) is not None:
                forms[name] = form
        if forms:
            structured = single_form(forms)
        if structured is not None:
            fields["structured"] = structured
        params = msgspec.structs.replace(defaults, **fields)
        return params.with_rule_temperature() if self.temperature is None else params


class Sampling(Drawing, kw_only=True):
    """The fields that the endpoints for completions, chats and `/generate` share beyond these."""

    max_tokens: Count | None = None  # 0 only with echo
    prompt_logprobs: Logprobs | None = None
    n: Annotated[int, _range(minimum=1, maximum=MAX_N)] | None = None
    # What the output must match.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


_SAMPLING_FIELDS = [name for name in SamplingParams.__struct_fields__ if name in Sampling.__struct_fields__]
_FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerateRequest(Sampling, kw_only=True):
    """`POST /generate`. Exactly one of `prompt`, `input_ids` and `messages`."""

    prompt: str | list[TokenId] | None = None
    input_ids: list[TokenId] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None  # for the chat template
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # for the chat template, as enable_thinking and by its name
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None  # the answer goes on with the last message
    fill_context: bool | None = None  # without max_tokens: on until the context is full
    logprobs: Logprobs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    stream: bool | None = None  # None: true


_OF_CHATS = ("tools", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message")


def refuse_chat_fields(body: GenerateRequest | TokenizeRequest) -> None:
    """Raise `InvalidRequestError` where a prompt comes with what only a chat template would read."""
    for name in _OF_CHATS:
        if getattr(body, name) not in (None, False, [], {}):
            raise InvalidRequestError(f"{name} goes with messages; a prompt passes no chat template", name)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with include_usage


UsageShown = Literal["never", "last", "always"]


class OpenAIRequest(Sampling, kw_only=True):
    """The fields that OpenAI's two endpoints have in common."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # as vLLM: of the prompt and of each choice
    return_tokens_as_token_ids: bool | None = None  # tokens of logprobs are written "token_id:5"

    def usage_shown(self) -> UsageShown:
        """Which chunks of a stream show usage.

        Raises `InvalidRequestError` for options of a stream where there is none, and for prompt logprobs where there
        is one: they come only with a whole answer, as in vLLM.
        """
        options = self.stream_options
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs needs stream to be false", "prompt_logprobs")
        if options is None:
            return "never"
        if not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
        if not options.include_usage:
            return "never"
        return "always" if options.continuous_usage_stats else "last"


class CompletionRequest(OpenAIRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Logprobs | None = None
    echo: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None  # keep the last so many
    best_of: Int | None = None  # nothing but n
    suffix: str | None = None  # refused


class ChatRequest(OpenAIRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # for the chat template, as enable_thinking and by its name
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None  # the answer goes on with the last message


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`. Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # for the chat template, as enable_thinking and by its name
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None  # the answer goes on with the last message
    add_special_tokens: bool | None = None  # None: true for a prompt, false for messages
    return_token_strs: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """`POST /abort`."""

    request_id: Annotated[str, Meta(min_length=1)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str | None = None
    lora_path: Annotated[str, Meta(max_length=4096)] | None = None
    load_inplace: bool | None = None  # one of that name is replaced


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str | None = None
    lora_int_id: Int | None = None  # taken, not used


class TemplateOptions(TypedDict):
    """Keyword arguments of `encode_chat`."""

    template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


class OfATemplate(Protocol):
    """A request with options for its chat template."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> ReasoningEffort | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def template_options(body: OfATemplate) -> TemplateOptions:
    """The request's options for its chat template, as arguments of `encode_chat`. Raises `InvalidRequestError` where
    that contradicts itself.

    `chat_template_kwargs` win over what follows from `reasoning_effort`.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other: either the last message goes on or "
            "another one begins",
            "add_generation_prompt",
        )
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    if effort is not None:
        thinks = effort not in ("none", "minimal")
        kwargs = {"enable_thinking": thinks, "reasoning_effort": effort, **(kwargs or {})}
    return TemplateOptions(
        template_kwargs=kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
    )
