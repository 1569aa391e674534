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
from aengine.http.structs import CompletionRequest
from aengine.http.wording import CompletionLogprobs, usage_body
from aengine.types import Completion, Fragment, SamplingParams

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

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
        prompts = split_prompts(body.prompt)
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
            return self._whole(stream, lambda completion: word_completion(head, completion))
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return self._stream(stream, CompletionDialect(head, include_usage))


async def _submit(
    engine: EngineLike, prompt: str | Sequence[int], params: SamplingParams, body: CompletionRequest, request_id: str
) -> StreamLike:
    async def submit(params: SamplingParams) -> StreamLike:
        return await engine.submit(
            prompt, params, request_id=request_id, priority=body.priority, cache_salt=body.cache_salt
        )

    return await submit_within_context(submit, params, body.max_tokens)


def split_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts in their four spellings: a string, ids, strings, lists of ids. Raises `InvalidRequestError`."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    several = [item for item in prompt if not isinstance(item, int)]
    if not several or len(several) != len(prompt) or len({type(item) for item in several}) > 1:
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
        )
    if len(several) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts in one request, got {len(several)}", "prompt")
    return several


class CompletionDialect(OpenAIDialect):
    def __init__(self, head: dict[str, Any], include_usage: bool) -> None:
        super().__init__(head, include_usage)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)  # by choice

    def _piece(self, index: int, text: str, fragment: Fragment | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].word(fragment.logprobs) if fragment is not None else None,
            "finish_reason": fragment.finish_reason if fragment is not None else None,
        }


def word_completion(head: dict[str, Any], completion: Completion) -> bytes:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": CompletionLogprobs().word(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for choice in completion.choices
    ]
    return sse.encode({**head, "choices": choices, "usage": usage_body(completion.usage)})
