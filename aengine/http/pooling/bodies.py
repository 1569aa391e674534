"""Requests and answers of the endpoints that generate no text: embeddings, classes, scores, rankings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from aengine.http.fields.sampling import Count, Int, TokenId
from aengine.http.fields.unknown import NOT_SUPPORTED, REFUSED, RequestBody, Unsupported, unless_false
from aengine.http.openai.bodies import PromptTokensDetails

Input = str | list[str | TokenId | list[TokenId]]
Truncation = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


_REFUSED: Mapping[str, Unsupported] = {
    "messages": Unsupported("send the text as input"),
    "chat_template": REFUSED["chat_template"],
    "mm_processor_kwargs": REFUSED["mm_processor_kwargs"],
    "truncation_side": REFUSED["truncation_side"],
    "embed_dtype": Unsupported("numbers are float32", ("float32",)),
    "endianness": Unsupported("numbers are little-endian", ("native", "little")),
    "use_activation": Unsupported("scores and classes are probabilities", (True,)),
    "activation": Unsupported("scores and classes are probabilities", (True,)),
    "softmax": Unsupported("scores and classes are probabilities", (True,)),
    "max_tokens_per_doc": Unsupported("not supported; shorten the documents"),
    "max_tokens_per_query": Unsupported("not supported; shorten the query"),
    "max_chunks_per_doc": Unsupported("not supported; shorten the documents"),
    "rank_fields": Unsupported("documents have one field, text", (["text"],)),
    "task": NOT_SUPPORTED,
    "late_chunking": unless_false("not supported"),
    "prompt_name": Unsupported("not supported; write it before the text"),
}


class PooledFields(RequestBody, kw_only=True):
    """The base of these requests."""

    refused: ClassVar[Mapping[str, Unsupported]] = _REFUSED

    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None  # accepted without effect


class ClassifyRequest(PooledFields, kw_only=True):
    """`POST /classify`."""

    input: Input
    truncate_prompt_tokens: Truncation | None = (
        None  # keep only this many of the last tokens; -1: as many as fit the context
    )
    add_special_tokens: bool | None = None  # None: true


class EmbeddingRequest(ClassifyRequest, kw_only=True):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None  # None: the checkpoint decides


class ScoreRequest(PooledFields, kw_only=True):
    """`POST /score`. Either `text_1` and `text_2`, or `queries` and `documents` with the same meaning."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    instruction: str | None = None


class Document(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PooledFields, kw_only=True):
    """`POST /rerank`."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Count | None = None  # 0: all
    return_documents: bool | None = None  # None: true
    instruction: str | None = None


POOLED = (ClassifyRequest, EmbeddingRequest, ScoreRequest, RerankRequest)


class PooledUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # str: little-endian float32 in base64


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: PooledUsage


class ClassifiedData(msgspec.Struct, frozen=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /classify`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifiedData]
    usage: PooledUsage


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: PooledUsage


class RankedData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RankTokens(msgspec.Struct, frozen=True):
    input_tokens: int


class RankMeta(msgspec.Struct, frozen=True):
    """`usage` in Cohere's format."""

    tokens: RankTokens


class RerankBody(msgspec.Struct, frozen=True):
    """`POST /rerank`."""

    id: str
    model: str
    usage: PooledUsage
    meta: RankMeta
    results: list[RankedData]
