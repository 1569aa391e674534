"""The bodies of OpenAI's completions and chats: requests, and answers as the OpenAPI document describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aengine.errors import InvalidRequestError
from aengine.http.fields.messages import ChatMessage, ReasoningEffort, ToolChoice, Tools
from aengine.http.fields.sampling import Count, Int, LastTokens, Logprobs, MultiChoiceRequest, TokenId
from aengine.http.fields.unknown import REFUSED_WITH_CHATS, Unsupported
from aengine.types import FinishReason


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # all chunks show usage; needs include_usage


UsageShown = Literal["never", "last", "always"]


class OpenAIRequest(MultiChoiceRequest, kw_only=True):
    """The fields that completions and chats share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # as in vLLM: the ids of the prompt and of each choice
    return_tokens_as_token_ids: bool | None = None  # logprobs show tokens as "token_id:5"

    def usage_shown(self) -> UsageShown:
        """Return which chunks of a stream show usage.

        Raises: InvalidRequestError for stream options without a stream, and for prompt logprobs with a stream. As in
        vLLM, only a whole answer has prompt logprobs.
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
    truncate_prompt_tokens: LastTokens | None = None
    best_of: Int | None = None  # refused unless it equals n
    suffix: str | None = None  # refused


class ChatRequest(OpenAIRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[Mapping[str, Unsupported]] = REFUSED_WITH_CHATS

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    truncate_prompt_tokens: LastTokens | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None  # the template gets it by this name, and as enable_thinking
    add_generation_prompt: bool | None = None  # None: true, unless the last message is continued
    continue_final_message: bool | None = None  # the answer continues the last message


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET  # of chats


class PromptCandidate(msgspec.Struct, frozen=True):
    logprob: float | None
    rank: int
    decoded_token: str


# For each token of the prompt, candidates by token id; unset without prompt_logprobs.
PromptLogprobs = list[dict[str, PromptCandidate] | None] | msgspec.UnsetType
TokenIds = list[int] | msgspec.UnsetType  # with return_token_ids


class CompletionLogprobsBody(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET


class CompletionBody(msgspec.Struct, frozen=True):
    """`POST /v1/completions` that does not stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class Candidate(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class CandidateWithTop(Candidate, frozen=True):
    top_logprobs: list[Candidate]


class ChatLogprobsBody(msgspec.Struct, frozen=True):
    content: list[CandidateWithTop] | None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ToolCallBody(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # the same
    tool_calls: list[ToolCallBody] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsBody | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: TokenIds = msgspec.UNSET


class ChatBody(msgspec.Struct, frozen=True):
    """`POST /v1/chat/completions` that does not stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
