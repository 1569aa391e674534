"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.bodies.requests import CompletionRequest, UsageTold
from aengine.http.endpoints.base import Endpoint, submit_within_context
from aengine.http.endpoints.prompts import Prompt, cut, split_prompts, text_of
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.openai.chunks import OpenAIDialect
from aengine.http.openai.logprobs import CompletionLogprobs, usage_body
from aengine.http.streams import sse
from aengine.http.streams.echo import EchoingStream
from aengine.http.streams.gathered import GatheredStream
from aengine.http.streams.prompt_logprobs import ToldPrompt, told_prompts
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
        params = _params(body, engine.default_params)
        usage_told = body.usage_told()
        _refuse_what_is_not_done(body)
        prompts = split_prompts(body.prompt)
        streams: list[StreamLike] = []
        try:
            for position, prompt in enumerate(prompts):
                if position:
                    await asyncio.sleep(0)  # a short prompt is tokenized at once, and there may be a thousand
                own_id = request_id if len(prompts) == 1 else f"{request_id}-{position}"
                prompt = await cut(prompt, body.truncate_prompt_tokens, engine.tokenizer)
                streams.append(await _submit(engine, prompt, params, body, own_id))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        stream = streams[0] if len(streams) == 1 else GatheredStream(request_id, streams, params.n)
        if not body.stream:
            stream, prompt_of = told_prompts(stream, engine.tokenizer, body.prompt_logprobs)
            return self._whole(stream, lambda completion: word_completion(head, completion, prompt_of))
        return self._stream(stream, CompletionDialect(head, stream, usage_told))


def _params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """As the engine shall have them; `echo` with logprobs needs those of the prompt."""
    params = body.params(defaults, max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    if body.echo and body.max_tokens == 0:
        params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0)
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=wanted)
    return params


def _refuse_what_is_not_done(body: CompletionRequest) -> None:
    if body.suffix:
        raise InvalidRequestError("suffix is not supported: the models served here do not fill in gaps", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of is not supported: ask for n and choose by logprobs", "best_of")


async def _submit(
    engine: EngineLike, prompt: Prompt, params: SamplingParams, body: CompletionRequest, request_id: str
) -> StreamLike:
    text = prompt
    if body.echo and body.logprobs is not None and isinstance(prompt, str):
        prompt = await engine.tokenizer.encode(prompt)

    async def submit(params: SamplingParams) -> StreamLike:
        return await engine.submit(
            prompt, params, request_id=request_id, priority=body.priority or 0, cache_salt=body.cache_salt
        )

    stream = await submit_within_context(submit, params, body.max_tokens)
    if not body.echo:
        return stream
    ids = prompt if isinstance(prompt, list) else []
    echoed = text_of(text, engine.tokenizer)
    return EchoingStream(stream, engine.tokenizer, echoed, ids, body.logprobs, mute=body.max_tokens == 0)


class CompletionDialect(OpenAIDialect):
    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_told: UsageTold) -> None:
        super().__init__(head, stream, usage_told)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)  # by choice

    def _piece(self, index: int, text: str, fragment: Fragment | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].word(fragment.logprobs) if fragment is not None else None,
            "finish_reason": fragment.finish_reason if fragment is not None else None,
        }


async def word_completion(head: dict[str, Any], completion: Completion, prompt_of: ToldPrompt) -> bytes:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": await CompletionLogprobs().raw(choice.logprobs),
            "finish_reason": choice.finish_reason,
            **prompt_of(choice.index),
        }
        for choice in completion.choices
    ]
    return sse.encode({**head, "choices": choices, "usage": usage_body(completion.usage)})
