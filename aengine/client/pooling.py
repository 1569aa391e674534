"""The methods of `Client` that draw no tokens: `embed`, `classify`, `score` and `rerank`."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx2
import msgspec

from aengine.client.connection import CONNECT_SECONDS, JSON, Connection, checked
from aengine.client.wire import WireUsage, check_request_id, request_json
from aengine.engine.requests.arguments import check_routing, prompt_list, text_list
from aengine.errors import InvalidRequestError, ServerError
from aengine.types import Classes, Classified, Embeddings, Ranked, Ranking, Scores

Prompt = str | Sequence[int]
T = TypeVar("T", bound=msgspec.Struct)
_WHOLE_ANSWER = 10  # times the timeout, because the server sends nothing before the whole answer


class _Embedding(msgspec.Struct):
    embedding: str


class _EmbeddingBody(msgspec.Struct):
    data: list[_Embedding]
    usage: WireUsage


class _Class(msgspec.Struct):
    label: str
    probs: tuple[float, ...]


class _ClassBody(msgspec.Struct):
    data: list[_Class]
    usage: WireUsage


class _Score(msgspec.Struct):
    score: float


class _ScoreBody(msgspec.Struct):
    data: list[_Score]
    usage: WireUsage


class _Rank(msgspec.Struct):
    index: int
    relevance_score: float


class _RankBody(msgspec.Struct):
    results: list[_Rank]
    usage: WireUsage


class PooledAnswers(Connection):
    """Embeds, classifies, scores and ranks texts on the server.

    Arguments, results and errors are those of `Engine`'s methods of the same names.

    Cancelling a call ends it on the server.
    """

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **routing: Any,
    ) -> Embeddings:
        """Return a vector for each prompt. A prompt is text or token ids; give one or several."""
        fields = {
            "input": prompt_list(prompts),
            "dimensions": dimensions,
            "normalize": normalize,
            "encoding_format": "base64",
        }
        found = await self._request("/v1/embeddings", fields, routing, _EmbeddingBody)
        return Embeddings(tuple(_vector(one.embedding) for one in found.data), found.usage.usage())

    async def classify(self, prompts: Prompt | Sequence[Prompt], **routing: Any) -> Classes:
        """Return the probability of each class for each prompt. The model needs a classification head."""
        found = await self._request("/classify", {"input": prompt_list(prompts)}, routing, _ClassBody)
        return Classes(tuple(Classified(one.label, one.probs) for one in found.data), found.usage.usage())

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        **routing: Any,
    ) -> Scores:
        """Return how well documents match queries: one query with several documents, or pairs of one each."""
        fields = {
            "queries": text_list(queries, "queries"),
            "documents": text_list(documents, "documents"),
            "instruction": instruction,
        }
        found = await self._request("/score", fields, routing, _ScoreBody)
        return Scores(tuple(one.score for one in found.data), found.usage.usage())

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **routing: Any,
    ) -> Ranking:
        """Return the documents in the order of their score for the query, the best first. top_n: None means all."""
        if top_n == 0:  # a server would return all
            raise InvalidRequestError("top_n must be at least 1, got 0", "top_n")
        fields = {
            "query": query,
            "documents": text_list(documents, "documents"),
            "top_n": top_n,
            "instruction": instruction,
            "return_documents": False,
        }
        found = await self._request("/rerank", fields, routing, _RankBody)
        ranked = tuple(Ranked(one.index, one.relevance_score) for one in found.results)
        return Ranking(ranked, found.usage.usage())

    async def _request(self, path: str, fields: dict[str, Any], routing: dict[str, Any], answer: type[T]) -> T:
        body, headers = _routed(fields, **routing)
        response = await self._send(
            "POST",
            path,
            content=request_json(body),
            headers=headers | JSON,
            timeout=httpx2.Timeout(self._timeout * _WHOLE_ANSWER, connect=CONNECT_SECONDS, pool=None),
        )
        try:
            return msgspec.json.decode(checked(response).content, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"the server sent an answer that cannot be read: {error}") from None


def _routed(
    fields: dict[str, Any],
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
    **unknown: object,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body and the headers of a request."""
    for name in unknown:
        raise InvalidRequestError(f"unknown parameter {name!r}", name)
    check_routing(priority, cache_salt, adapter)
    headers = {} if request_id is None else {"X-Request-Id": check_request_id(request_id)}
    return {**fields, "model": adapter, "priority": priority, "cache_salt": cache_salt}, headers


def _vector(text: str) -> array[float]:
    try:
        vector = array("f", base64.b64decode(text, validate=True))
    except ValueError as error:
        raise ServerError(f"the server sent an embedding that cannot be read: {error}") from None
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
