"""`Engine`'s methods for what is taken of prompts in place of draws: `embed`, `classify`, `score` and `rerank`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.engine.loaded import Loaded
from aengine.engine.pooling.scorer import Scorer, refuse_scores
from aengine.engine.pooling.vectors import cosine, embedding_of, probabilities, vector_of
from aengine.engine.requests.arguments import check_routing, prompt_list, text_list
from aengine.engine.requests.gate import Gate
from aengine.engine.requests.pooled import PooledRequest
from aengine.errors import InvalidRequestError, renamed_param
from aengine.step_plan import Pool
from aengine.types import Classes, Classified, Embeddings, Ranked, Ranking, Scores

MAX_TOKENS = 2**21  # of one request; 100 MB while they wait

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a request's prompts go: what the queue orders, what they share cached prefixes with, their adapter."""

    priority: int
    cache_salt: str | None
    adapter: str | None


class PooledAnswers(ABC):
    """Prompts are read beside those that generate, through the same steps and the same cache.

    All methods take `request_id`, `priority`, `cache_salt` and `adapter` as `Engine.submit` does. Cancelling one gives
    its memory back. They raise what `submit` raises, and `InvalidRequestError` where the model does not do what is
    asked.
    """

    _gate: Gate

    @abstractmethod
    def _serving(self) -> Loaded: ...

    @abstractmethod
    def _enqueue_pooled(
        self, prompts: Sequence[list[int]], pool: Pool, request_id: str | None, routing: Routing
    ) -> PooledRequest: ...

    @abstractmethod
    def abort(self, request_id: str) -> bool: ...

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **routing: Any,
    ) -> Embeddings:
        """A vector of each prompt: text as the tokenizer reads it, or token ids; one of them or several.

        It is the hidden state of the last token, or the mean of all, as the checkpoint says. dimensions: the first so
        many numbers alone, where the checkpoint allows it. normalize: to length 1; None: as the checkpoint says.
        """
        ready = self._serving()
        pooling = ready.pooling
        if pooling.refusal:
            raise InvalidRequestError(f"the model has no embeddings here: {pooling.refusal}", "model")
        _check_dimensions(dimensions, pooling.dimensions, ready.runtime.model.hidden_size)
        request = await self._pooled(await self._encoded(prompts), Pool(pooling.kind), routing)
        unit = pooling.normalize if normalize is None else normalize
        vectors = tuple(embedding_of(vector, dimensions, unit) for vector in _vectors(request, ready))
        return Embeddings(vectors, request.usage())

    async def classify(self, prompts: Prompt | Sequence[Prompt], **routing: Any) -> Classes:
        """How likely each class is of each prompt, where the model has a classification head."""
        ready = self._serving()
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
        *,
        instruction: str | None = None,
        **routing: Any,
    ) -> Scores:
        """How well documents suit queries: one query and one or several documents, or as many of both, pair by pair.

        A reranker says how likely it finds each pair; of any other model the embeddings are compared (cosine).
        instruction: what makes a document a good one, for a reranker that reads it.
        """
        ready = self._serving()
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
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **routing: Any,
    ) -> Ranking:
        """The documents by their `score` with the query, the best first. top_n: that many of them; None: all."""
        if not isinstance(query, str):
            raise InvalidRequestError(f"query must be text, got {type(query).__name__}", "query")
        if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
            raise InvalidRequestError(f"top_n must be at least 1, got {top_n!r}", "top_n")
        scores = await self.score(query, documents, instruction=instruction, **routing)
        ranked = sorted((Ranked(*found) for found in enumerate(scores.values)), key=lambda one: -one.score)
        return Ranking(tuple(ranked[:top_n]), scores.usage)

    async def _judged(
        self, scorer: Scorer, pairs: Sequence[tuple[str, str]], instruction: str | None, routing: dict[str, Any]
    ) -> Scores:
        if instruction is not None and not isinstance(instruction, str):
            raise InvalidRequestError(f"instruction must be text, got {type(instruction).__name__}", "instruction")
        context = self._serving().runtime.pool.max_model_len
        ids, total = [], 0
        for query, document in pairs:
            await asyncio.sleep(0)  # a short text is tokenized at once, and there may be thousands
            ids.append(await scorer.pairs.encode(query, document, instruction, context))
            total = _counted(total, ids[-1], "documents")
        request = await self._pooled(ids, scorer.pool, routing)
        return Scores(tuple(scorer.score(numbers) for (numbers,) in request.vectors), request.usage())

    async def _similarities(self, pairs: Sequence[tuple[str, str]], routing: dict[str, Any]) -> Scores:
        """Each text is read once, in however many pairs it is."""
        ready = self._serving()
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
        ready = self._serving()
        self._gate.check()
        ids, total = [], 0
        for prompt in prompt_list(prompts):
            if isinstance(prompt, str):
                await asyncio.sleep(0)  # a short text is tokenized at once, and there may be thousands
                prompt = await ready.tokenizer.encode(prompt, context=ready.runtime.pool.max_model_len, left=0)
            ids.append(prompt)
            total = _counted(total, prompt, "prompt")
        return ids

    async def _pooled(self, prompts: Sequence[list[int]], pool: Pool, routing: dict[str, Any]) -> PooledRequest:
        """Enqueue, and wait for the end. Whatever ends the waiting gives the memory back."""
        request_id, checked = _routing(**routing)
        await self._gate.enter()
        request = self._enqueue_pooled(prompts, pool, request_id, checked)
        try:
            await request.done
        finally:
            if not request.ended:
                self.abort(request.id)
        return request


def _routing(
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter: str | None = None,
    **unknown: object,
) -> tuple[str | None, Routing]:
    for name in unknown:
        raise InvalidRequestError(f"unknown parameter {name!r}", name)
    check_routing(priority, cache_salt, adapter)
    return request_id, Routing(priority, cache_salt, adapter)


def _counted(total: int, ids: list[int], name: str) -> int:
    """The tokens of a request so far. Raises `InvalidRequestError`: a query may stand in front of many documents."""
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
