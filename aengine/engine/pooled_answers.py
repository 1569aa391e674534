"""Serves requests that generate no tokens: embeddings, classes, scores and rankings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.engine.loaded import Loaded
from aengine.engine.pooling.scores import Scorer, cosine, embedding_of, probabilities, refuse_scores, vector_of
from aengine.engine.requests.arguments import Routing, prompt_list, text_list
from aengine.engine.requests.pooled import PooledRequest
from aengine.engine.requests.registry import Requests
from aengine.errors import InvalidRequestError, renamed_param
from aengine.step_plan import Pool
from aengine.types import Classes, Classified, Embeddings, Ranked, Ranking, Scores

MAX_TOKENS = 2**21  # of one request; they take 100 MB while they wait

Prompt = str | Sequence[int]


class Pooling:
    """Implements the methods of `Engine` that pool prompts.

    Pooled prompts share steps and the prefix cache with all other requests. In all methods, `routing` has fields of
    `Routing`. They are checked after the prompts.
    """

    def __init__(self, loaded: Loaded, requests: Requests) -> None:
        self._loaded = loaded
        self._requests = requests

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None,
        normalize: bool | None,
        routing: dict[str, Any],
    ) -> Embeddings:
        """Return an embedding vector for each prompt."""
        ready = self._loaded
        pooling = ready.pooling
        if pooling.refusal:
            raise InvalidRequestError(f"the model has no embeddings here: {pooling.refusal}", "model")
        _check_dimensions(dimensions, pooling.dimensions, ready.runtime.model.hidden_size)
        request = await self._pooled(await self._encoded(prompts), Pool(pooling.kind), routing)
        unit = pooling.normalize if normalize is None else normalize
        vectors = tuple(embedding_of(vector, dimensions, unit) for vector in _vectors(request, ready))
        return Embeddings(vectors, request.usage())

    async def classify(self, prompts: Prompt | Sequence[Prompt], routing: dict[str, Any]) -> Classes:
        """Return the probability of each class for each prompt."""
        ready = self._loaded
        pooling = ready.pooling
        if ready.runtime.model.head != "classes":
            raise InvalidRequestError("the model has no classification head", "model")
        request = await self._pooled(await self._encoded(prompts), Pool("classes"), routing)
        found = [probabilities(numbers, pooling.independent) for (numbers,) in request.vectors]
        results = tuple(Classified(pooling.labels[int(np.argmax(one))], one) for one in found)
        return Classes(results, request.usage())

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None,
        routing: dict[str, Any],
    ) -> Scores:
        """Return how relevant each document is to its query."""
        ready = self._loaded
        pairs = _pairs(text_list(queries, "queries"), text_list(documents, "documents"))
        if ready.scorer is None:
            refuse_scores(ready.runtime.model, ready.pooling)
            if instruction is not None:
                raise InvalidRequestError("instruction: this model compares texts and reads none", "instruction")
            return await self._similarities(pairs, routing)
        return await self._judged(ready.scorer, pairs, instruction, routing)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None,
        instruction: str | None,
        routing: dict[str, Any],
    ) -> Ranking:
        """Return the documents in the order of their score with the query, the best first."""
        if not isinstance(query, str):
            raise InvalidRequestError(f"query must be text, got {type(query).__name__}", "query")
        if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
            raise InvalidRequestError(f"top_n must be at least 1, got {top_n!r}", "top_n")
        scores = await self.score(query, documents, instruction, routing)
        ranked = sorted((Ranked(*found) for found in enumerate(scores.values)), key=lambda one: -one.score)
        return Ranking(tuple(ranked[:top_n]), scores.usage)

    async def _judged(
        self, scorer: Scorer, pairs: Sequence[tuple[str, str]], instruction: str | None, routing: dict[str, Any]
    ) -> Scores:
        if instruction is not None and not isinstance(instruction, str):
            raise InvalidRequestError(f"instruction must be text, got {type(instruction).__name__}", "instruction")
        context = self._loaded.max_model_len
        ids, total = [], 0
        for query, document in pairs:
            await asyncio.sleep(0)  # encoding a short text does not yield, and there may be thousands
            ids.append(await scorer.pairs.encode(query, document, instruction, context))
            total = _counted(total, ids[-1], "documents")
        request = await self._pooled(ids, scorer.pool, routing)
        return Scores(tuple(scorer.score(numbers) for (numbers,) in request.vectors), request.usage())

    async def _similarities(self, pairs: Sequence[tuple[str, str]], routing: dict[str, Any]) -> Scores:
        """Compare embeddings. Each text is computed once, even if it is in several pairs."""
        ready = self._loaded
        if ready.pooling.refusal:
            raise InvalidRequestError(f"the model has no embeddings here: {ready.pooling.refusal}", "model")
        ids: dict[str, list[int]] = {}
        for name, texts in zip(("queries", "documents"), zip(*pairs, strict=True), strict=True):
            if new := [text for text in dict.fromkeys(texts) if text not in ids]:
                with renamed_param({"prompt": name}):
                    ids |= zip(new, await self._encoded(new), strict=True)
        _counted(sum(map(len, ids.values())), [], "documents")
        request = await self._pooled(list(ids.values()), Pool(ready.pooling.kind), routing)
        vectors = dict(zip(ids, _vectors(request, ready), strict=True))
        return Scores(tuple(cosine(vectors[one], vectors[other]) for one, other in pairs), request.usage())

    async def _encoded(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        ready = self._loaded
        self._requests.gate.check()
        ids, total = [], 0
        for prompt in prompt_list(prompts):
            if isinstance(prompt, str):
                await asyncio.sleep(0)  # encoding a short text does not yield, and there may be thousands
                prompt = await ready.tokenizer.encode(prompt, context=ready.max_model_len, left=0)
            ids.append(prompt)
            total = _counted(total, prompt, "prompt")
        return ids

    async def _pooled(self, prompts: Sequence[list[int]], pool: Pool, routing: dict[str, Any]) -> PooledRequest:
        """Enqueue prompts and wait until all are pooled. Cancelling the call frees their memory."""
        loaded, requests, checked = self._loaded, self._requests, Routing.from_options(routing)
        checked.check()
        packed = []
        for ids in prompts:
            await asyncio.sleep(0)  # checking takes tens of microseconds, and there may be thousands of prompts
            packed.append(loaded.sequences.pooled_prompt(ids))
        await requests.gate.enter()
        requests.check()  # the engine may have been closed meanwhile
        request_id = requests.new_id(checked.request_id)
        adapter = loaded.adapter(checked.adapter)
        sequences = [
            loaded.sequences.for_pooling(
                prompt, pool, rank=requests.rank(checked.priority), salt=checked.cache_salt, adapter=adapter
            )
            for prompt in packed
        ]
        request = PooledRequest(request_id, sequences, requests.forget, loaded.latencies)
        loaded.scheduler.add_pooled(sequences)
        requests.begin(request)
        try:
            await request.done
        finally:
            requests.abort(request)
        return request


def _counted(total: int, ids: list[int], name: str) -> int:
    """Return `total` plus the number of `ids`. A query counts once for each of its documents.

    Raises `InvalidRequestError` if the sum exceeds MAX_TOKENS.
    """
    total += len(ids)
    if total > MAX_TOKENS:
        raise InvalidRequestError(f"{name} have more than {MAX_TOKENS} tokens together: send fewer at once", name)
    return total


def _check_dimensions(dimensions: int | None, allowed: tuple[int, ...] | None, hidden: int) -> None:
    if dimensions is None:
        return
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 1 <= dimensions <= hidden:
        raise InvalidRequestError(f"dimensions must be from 1 to {hidden}, got {dimensions!r}", "dimensions")
    if allowed is None and dimensions != hidden:
        raise InvalidRequestError(
            f"dimensions: the model's embeddings have {hidden}, and its config.json does not say that they may be cut; "
            "if they were trained for that (Matryoshka), set the engine's knob matryoshka",
            "dimensions",
        )
    if allowed and dimensions not in (*allowed, hidden):
        raise InvalidRequestError(
            f"dimensions must be one of {', '.join(map(str, allowed))}, got {dimensions}", "dimensions"
        )


def _vectors(request: PooledRequest, ready: Loaded) -> Iterable[NDArray[np.float64]]:
    mean = ready.pooling.kind == "mean"
    return (vector_of(sequence.pooled, sequence.prompt_len, mean) for sequence in request.sequences)


def _pairs(queries: list[str], documents: list[str]) -> list[tuple[str, str]]:
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise InvalidRequestError(
            f"there must be one query or as many as documents, got {len(queries)} and {len(documents)}", "queries"
        )
    return list(zip(queries, documents, strict=True))
