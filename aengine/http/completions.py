"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http import sse
from aengine.http.endpoint import Endpoint, submit_within_context
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.gathered import GatheredStream
from aengine.http.openai_dialect import OpenAIDialect
from aengine.http.prompts import cut, split_prompts, text_of
from aengine.http.structs import CompletionRequest, UsageTold
from aengine.http.wording import CompletionLogprobs, usage_body
from aengine.types import Completion, Fragment, SamplingParams

DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions(Endpoint):
    async def create(self, request: Request) -> Response:
        engine, body = await self._accept(request, _decoder)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._state.check_model(body.model),
        }
        params = body.params(engine.default_params, max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
        usage_told = body.usage_told()
        _refuse_what_is_not_done(body)
        cut_to, tokenizer = body.truncate_prompt_tokens, engine.tokenizer
        prompts = [await cut(prompt, cut_to, tokenizer) for prompt in split_prompts(body.prompt)]
        echoes = [text_of(prompt, tokenizer) if body.echo else "" for prompt in prompts for _ in range(params.n)]
        streams: list[StreamLike] = []
        try:
            for position, prompt in enumerate(prompts):
                own_id = request_id if len(prompts) == 1 else f"{request_id}-{position}"
                streams.append(await _submit(engine, prompt, params, body, own_id))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        stream = streams[0] if len(streams) == 1 else GatheredStream(request_id, streams, params.n)
        if not body.stream:
            return self._whole(stream, lambda completion: word_completion(head, completion, echoes))
        return self._stream(stream, CompletionDialect(head, stream, usage_told, echoes))


def _refuse_what_is_not_done(body: CompletionRequest) -> None:
    if body.suffix:
        raise InvalidRequestError("suffix is not supported: the models served here do not fill in gaps", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of is not supported: ask for n and choose by logprobs", "best_of")


async def _submit(
    engine: EngineLike, prompt: str | Sequence[int], params: SamplingParams, body: CompletionRequest, request_id: str
) -> StreamLike:
    async def submit(params: SamplingParams) -> StreamLike:
        return await engine.submit(
            prompt, params, request_id=request_id, priority=body.priority, cache_salt=body.cache_salt
        )

    return await submit_within_context(submit, params, body.max_tokens)


class CompletionDialect(OpenAIDialect):
    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_told: UsageTold, echoes: list[str]) -> None:
        """`echoes` has the prompt of each choice, or empty strings."""
        super().__init__(head, stream, usage_told)
        self._echoes = echoes
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)  # by choice

    def opening(self) -> bytes:
        """The prompts, where they are echoed."""
        pieces = (self._piece(index, text, None) for index, text in enumerate(self._echoes) if text)
        return b"".join(sse.event(self._chunk(piece)) for piece in pieces)

    def _piece(self, index: int, text: str, fragment: Fragment | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].word(fragment.logprobs) if fragment is not None else None,
            "finish_reason": fragment.finish_reason if fragment is not None else None,
        }


def word_completion(head: dict[str, Any], completion: Completion, echoes: list[str]) -> bytes:
    choices = [
        {
            "index": choice.index,
            "text": echoes[choice.index] + choice.text,
            "logprobs": CompletionLogprobs().word(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for choice in completion.choices
    ]
    return sse.encode({**head, "choices": choices, "usage": usage_body(completion.usage)})
