"""The bodies of responses as structs, which handlers encode and the OpenAPI schema describes."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from aengine.types import FinishReason, TokenLogprob


class Tokenized(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as the vocabulary writes them


class Detokenized(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    prompt: str


class Aborted(msgspec.Struct, frozen=True):
    """`POST /abort`."""

    aborted: int  # requests


class Flushed(msgspec.Struct, frozen=True):
    """`POST /flush_cache`."""

    flushed: bool = True


class Version(msgspec.Struct, frozen=True):
    """`GET /version`."""

    version: str


HealthWord = Literal["ok", "loading", "ready", "failed", "stopping", "stalled"]


class HealthStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /health`."""

    status: HealthWord
    reason: str = ""


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /ready`."""

    ready: bool
    model: str | None = None
    reason: str = ""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models/{model}`: OpenAI's fields and vLLM's, then Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int  # unix seconds
    owned_by: str = "aengine"
    root: str  # the Hugging Face id, or the folder's name
    parent: str | None = None  # of an adapter: the model
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`: all of them on one page."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
    first_id: str
    last_id: str


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


PromptLogprobs = list[dict[str, PromptCandidate] | None] | msgspec.UnsetType  # by token id; unset where nobody asked
TokenIds = list[int] | msgspec.UnsetType  # with return_token_ids


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | msgspec.UnsetType = msgspec.UNSET  # where one of `stop` ended it
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate` that does not stream."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_string: str | msgspec.UnsetType = msgspec.UNSET  # where one of `stop` ended it
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET
    choices: list[GeneratedChoice] | msgspec.UnsetType = msgspec.UNSET  # where n > 1
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    usage: UsageBody


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


class ServerLoad(msgspec.Struct, frozen=True):
    """`GET /load`."""

    server_load: int  # requests, running or waiting


class WorkerLoad(msgspec.Struct, frozen=True):
    """An entry of `GET /get_load`."""

    num_reqs: int  # running or waiting
    num_waiting_reqs: int
    num_tokens: int  # KV that running requests hold
    dp_rank: int = 0


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /v1/loads`."""

    dp_rank: int = 0
    timestamp: float  # unix seconds
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float  # share of these that running requests hold
    cache_hit_rate: float


class LoadList(msgspec.Struct, frozen=True):
    """`GET /v1/loads`."""

    timestamp: float
    loads: list[RankLoad]
    dp_rank_count: int = 1
