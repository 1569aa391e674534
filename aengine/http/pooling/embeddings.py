"""`POST /v1/embeddings` and `POST /classify`: a vector or a class for each text."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
import uuid
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.engine.requests.arguments import prompt_list
from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.endpoint import Endpoint, json_response
from aengine.http.engine_like import EngineLike
from aengine.http.entry.context import context_of
from aengine.http.openai.bodies import PromptTokensDetails
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.pooling.bodies import (
    ClassifiedData,
    ClassifyBody,
    ClassifyRequest,
    EmbeddingBody,
    EmbeddingData,
    EmbeddingRequest,
    PooledUsage,
)
from aengine.http.state import ServerState
from aengine.http.streams.document import document, encoded_list
from aengine.types import Usage

_SLICE_FLOATS = 2**14  # floats that are encoded in one iteration of the loop; 2 ms
_NAMES = {"prompt": "input"}


@dataclass(frozen=True, slots=True)
class PooledWork:
    """The prompts of one request."""

    engine: EngineLike
    id: str

    def abort(self) -> bool:
        """End the work. Returns False if it is still tokenizing, or done."""
        return self.engine.abort(self.id)


@contextmanager
def abortable(request: Request, engine: EngineLike, request_id: str) -> Iterator[None]:
    """Within this context `/abort` can end the work, by `request_id` or by the `X-Request-Id`."""
    context = context_of(request.scope)
    context.work = PooledWork(engine, request_id)
    try:
        yield
    finally:
        context.work = None


_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
_classify_decoder = msgspec.json.Decoder(ClassifyRequest)


class Embeddings(Endpoint):
    async def create(self, request: Request) -> Response:
        engine, body, model, salt = await self._read_request(request, _embedding_decoder)
        request_id = f"embd-{uuid.uuid4().hex}"
        with renamed_param(_NAMES), abortable(request, engine, request_id):
            found = await engine.embed(
                await _prompts(engine, body),
                dimensions=body.dimensions,
                normalize=body.normalize,
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=salt,
                adapter=model.adapter,
            )
        in_base64 = body.encoding_format == "base64"

        def data(numbered: tuple[int, array[float]]) -> EmbeddingData:
            index, vector = numbered
            return EmbeddingData(index=index, embedding=base64_of(vector) if in_base64 else vector.tolist())

        each = max(1, _SLICE_FLOATS // len(found.vectors[0]))
        encoded = await encoded_list(list(enumerate(found.vectors)), data, each)
        answer = {"object": "list", "data": encoded, "model": model.name, "usage": usage_of(found.usage)}
        return Response(b"".join(document(answer)), media_type="application/json")

    async def classify(self, request: Request) -> Response:
        engine, body, model, salt = await self._read_request(request, _classify_decoder)
        request_id = f"classify-{uuid.uuid4().hex}"
        with renamed_param(_NAMES), abortable(request, engine, request_id):
            found = await engine.classify(
                await _prompts(engine, body),
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=salt,
                adapter=model.adapter,
            )
        data = [
            ClassifiedData(index, one.label, list(one.probabilities), len(one.probabilities))
            for index, one in enumerate(found.results)
        ]
        created = int(time.time())
        return json_response(
            ClassifyBody(id=request_id, created=created, model=model.name, data=data, usage=usage_of(found.usage))
        )


async def _prompts(engine: EngineLike, body: ClassifyRequest) -> Any:
    """Return the texts unchanged. If they are truncated or get no special tokens, return them as ids."""
    last, special = body.truncate_prompt_tokens, body.add_special_tokens is not False
    if last == 0:
        raise InvalidRequestError("truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens")
    if last is None and special:
        return body.input
    keep = engine.max_model_len if last == -1 else last or 0  # 0: all
    context = engine.max_model_len if last is None else None  # a text that is truncated may be longer
    prompts = []
    for prompt in prompt_list(body.input):
        await asyncio.sleep(0)  # a short text is tokenized within the loop, and there may be thousands
        if isinstance(prompt, str):
            prompt = await engine.tokenizer.encode(prompt, special, context, left=0)
        prompts.append(prompt[-keep:])
    return prompts


def base64_of(vector: array[float]) -> str:
    """Return the numbers as little-endian float32 in base64."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def usage_of(usage: Usage) -> PooledUsage:
    return PooledUsage(usage.prompt_tokens, usage.total_tokens, PromptTokensDetails(usage.cached_tokens))


def operations(state: ServerState) -> list[Operation]:
    embeddings = Embeddings(state)
    return [
        Operation(
            "POST",
            "/v1/embeddings",
            embeddings.create,
            "A vector of each text.",
            body=EmbeddingRequest,
            answer=EmbeddingBody,
            refusals=ALL_ERRORS,
        ),
        Operation(
            "POST",
            "/classify",
            embeddings.classify,
            "The class of each text.",
            body=ClassifyRequest,
            answer=ClassifyBody,
            refusals=ALL_ERRORS,
        ),
    ]
