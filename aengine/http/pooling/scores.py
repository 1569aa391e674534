"""`POST /score` and `POST /rerank`: relevance scores of text pairs, and documents ordered by relevance."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.endpoint import Endpoint, json_response
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.pooling.bodies import (
    Document,
    RankedData,
    RankMeta,
    RankTokens,
    RerankBody,
    RerankRequest,
    ScoreBody,
    ScoreData,
    ScoreRequest,
)
from aengine.http.pooling.embeddings import abortable, usage_of
from aengine.http.state import ServerState

_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)


class Scores(Endpoint):
    async def score(self, request: Request) -> Response:
        engine, body, model, salt = await self._read_request(request, _score_decoder)
        names, queries, documents = _texts(body)
        for query in [queries] if isinstance(queries, str) else queries:
            _refuse_empty(query, names["queries"])
        request_id = f"score-{uuid.uuid4().hex}"
        with renamed_param(names), abortable(request, engine, request_id):
            found = await engine.score(
                queries,
                documents,
                instruction=body.instruction,
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=salt,
                adapter=model.adapter,
            )
        data = [ScoreData(index=index, score=score) for index, score in enumerate(found.values)]
        created = int(time.time())
        return json_response(
            ScoreBody(id=request_id, created=created, model=model.name, data=data, usage=usage_of(found.usage))
        )

    async def rerank(self, request: Request) -> Response:
        engine, body, model, salt = await self._read_request(request, _rerank_decoder)
        _refuse_empty(body.query, "query")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        request_id = f"rerank-{uuid.uuid4().hex}"
        with renamed_param({"prompt": "documents", "queries": "query"}), abortable(request, engine, request_id):
            found = await engine.rerank(
                body.query,
                texts,
                top_n=body.top_n or None,
                instruction=body.instruction,
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=salt,
                adapter=model.adapter,
            )
        shown = body.return_documents is not False
        results = [
            RankedData(
                index=one.index,
                document=Document(text=texts[one.index]) if shown else msgspec.UNSET,
                relevance_score=one.score,
            )
            for one in found.results
        ]
        usage = usage_of(found.usage)
        return json_response(
            RerankBody(request_id, model.name, usage, RankMeta(RankTokens(usage.prompt_tokens)), results)
        )


def _refuse_empty(query: str, name: str) -> None:
    """Raise `InvalidRequestError` for an empty query. The engine's error would name the documents."""
    if not query:
        raise InvalidRequestError(f"{name} must not be empty", name)


def _texts(body: ScoreRequest) -> tuple[dict[str, str], str | list[str], str | list[str]]:
    """Return the client's names of the parameters, the queries and the documents."""
    for one, other in (("text_1", "text_2"), ("queries", "documents")):
        queries, documents = getattr(body, one), getattr(body, other)
        if queries is None and documents is None:
            continue
        for name, texts in ((one, queries), (other, documents)):
            if texts is None:
                raise InvalidRequestError(f"{name} must be given, as {one} and {other} go together", name)
        if one == "text_1" and not (body.queries is None and body.documents is None):
            raise InvalidRequestError("either text_1 and text_2 or queries and documents, not both", "queries")
        return {"queries": one, "documents": other, "prompt": other}, queries, documents
    raise InvalidRequestError("text_1 and text_2 must be given, or queries and documents", "text_1")


def operations(state: ServerState) -> list[Operation]:
    scores = Scores(state)
    scored = [
        Operation("POST", path, scores.score, summary, body=ScoreRequest, answer=ScoreBody, refusals=ALL_ERRORS)
        for path, summary in (
            ("/score", "Relevance scores of text pairs."),
            ("/v1/score", "The same as /score."),
        )
    ]
    ranked = [
        Operation("POST", path, scores.rerank, summary, body=RerankRequest, answer=RerankBody, refusals=ALL_ERRORS)
        for path, summary in (
            ("/rerank", "Documents ordered by their relevance to a query."),
            ("/v1/rerank", "The same as /rerank."),
            ("/v2/rerank", "The same as /rerank."),
        )
    ]
    return [*scored, *ranked]
