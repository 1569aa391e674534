"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.endpoint import Endpoint
from aengine.http.engine_like import EngineLike, StreamLike, TokenizerLike
from aengine.http.fields.prompts import Prompt, keep_last_tokens
from aengine.http.openai.bodies import CompletionBody, CompletionRequest
from aengine.http.openai.chunks import CompletionChunkEncoder
from aengine.http.openai.echo import EchoingStream
from aengine.http.openai.gathered import GatheredStream
from aengine.http.openai.logprobs import CompletionForm, CompletionLogprobs, TextOffsets, usage_body
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.http.streams.document import DocumentResponse
from aengine.http.streams.prompt_logprobs import PromptLogprobsOf, with_prompt_logprobs
from aengine.http.streams.sse import EventStreamResponse
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Completion

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024  # in one request: prompts x n
# Characters that `echo` repeats in one answer, over all choices. A whole answer has them in memory three times.
MAX_ECHO = 2**25

_decoder = msgspec.json.Decoder(CompletionRequest)


class Completions(Endpoint):
    async def create(self, request: Request) -> Response:
        parsed = await self._read_request(request, _decoder)
        engine, body = parsed.engine, parsed.body
        request_id = f"cmpl-{uuid.uuid4().hex}"
        head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": parsed.model.name,
        }
        params = _params(body, engine.default_params)
        usage_shown = body.usage_shown()
        _refuse_unsupported(body)
        prompts = split_prompts(body.prompt, params.n)
        echoed = body.echo and body.logprobs is not None
        budget = self._candidate_budget(
            engine,
            params,
            copies=params.n * (bool(echoed) + (body.prompt_logprobs is not None)),
            streamed=bool(body.stream),
            prompts=len(prompts),
            field="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )
        echoed_characters = 0  # in the whole answer
        streams: list[StreamLike] = []
        read: list[tuple[str, Sequence[int]]] = []  # for each prompt: the echoed text, and the ids
        try:
            for position, prompt in enumerate(prompts):
                if position:
                    await asyncio.sleep(0)  # a short prompt is tokenized within the loop, and there may be a thousand
                own_id = request_id if len(prompts) == 1 else f"{request_id}-{position}"
                prompt = await keep_last_tokens(prompt, body.truncate_prompt_tokens, engine.tokenizer)
                text = text_of(prompt, engine.tokenizer) if body.echo else ""
                echoed_characters += len(text) * params.n
                _check_echo(echoed_characters)
                if body.return_token_ids and isinstance(prompt, str):
                    prompt = await engine.tokenizer.encode(prompt, context=engine.max_model_len)
                submitted = await self._submit(parsed, prompt, params, own_id, budget=budget)
                stream, prompt = submitted.stream, submitted.prompt
                read.append((text, () if isinstance(prompt, str) else prompt))
                streams.append(_echoing(stream, engine, text, prompt, body) if body.echo else stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        form = _form(engine, body, params, read)
        stream = streams[0] if len(streams) == 1 else GatheredStream(request_id, streams, params.n)
        if not body.stream:
            stream, prompt_logprobs_of = with_prompt_logprobs(stream, engine.tokenizer, body.prompt_logprobs)
            return DocumentResponse(
                stream, lambda completion: completion_body(head, completion, prompt_logprobs_of, form)
            )
        return EventStreamResponse(stream, CompletionChunkEncoder(head, stream, usage_shown, form), self._state.config)


def _params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters. `echo` with logprobs needs the prompt's logprobs."""
    params = body.params(defaults, max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    if body.echo and body.max_tokens == 0:
        params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0)
    if body.echo and body.logprobs is not None:
        count = max(body.logprobs, body.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=count)
    return params


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.suffix:
        raise InvalidRequestError("suffix is not supported: the model cannot fill in text before a suffix", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of is not supported: ask for n and choose by logprobs", "best_of")


def _form(
    engine: EngineLike, body: CompletionRequest, params: SamplingParams, read: Sequence[tuple[str, Sequence[int]]]
) -> CompletionForm:
    """Return the form of the choices. Each prompt has n choices."""
    hidden = engine.tokenizer.special_ids.difference(params.shown_special_ids) if params.skip_special_tokens else ()

    def logprobs(index: int) -> CompletionLogprobs:
        text, ids = read[index // params.n]
        echoed = len(ids) if body.echo and body.logprobs is not None else 0
        offsets = TextOffsets(engine.tokenizer, hidden, text, echoed)
        return CompletionLogprobs(offsets, bool(body.return_tokens_as_token_ids))

    return CompletionForm(logprobs, (lambda index: read[index // params.n][1]) if body.return_token_ids else None)


def _echoing(
    stream: StreamLike, engine: EngineLike, text: str, prompt: Prompt, body: CompletionRequest
) -> EchoingStream:
    ids = prompt if isinstance(prompt, list) else []
    return EchoingStream(stream, engine.tokenizer, text, ids, body.logprobs, mute=body.max_tokens == 0)


async def completion_body(
    head: dict[str, Any], completion: Completion, prompt_logprobs_of: PromptLogprobsOf, form: CompletionForm
) -> object:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": await form.logprobs(choice.index).encoded_body(choice.logprobs, len(choice.text)),
            "finish_reason": choice.finish_reason,
            **form.ids_of_prompt(choice.index),
            **({} if form.prompt_ids is None else {"token_ids": choice.token_ids}),
            **prompt_logprobs_of(choice.index),
        }
        for choice in completion.choices
    ]
    return {**head, "choices": choices, "usage": usage_body(completion.usage)}


def split_prompts(prompt: str | Sequence[str | int | list[int]], n: int) -> list[Prompt]:
    """Return a request's prompts as a list.

    prompt: a string, ids, a list of strings, or a list of lists of ids.

    n: choices of each prompt. Raises `InvalidRequestError` for too many choices.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # one pass within C, because there may be a million ids
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    several = cast("list[Prompt]", prompt)
    if kinds not in ({str}, {list}):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
        )
    if len(several) * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"one request makes at most {MAX_CHOICES} choices, {len(several)} prompts with n = {n} "
            f"would make {len(several) * n}: send fewer prompts, or lower n",
            "prompt" if len(several) > MAX_CHOICES else "n",
        )
    return several


def _check_echo(characters: int) -> None:
    """Raise `InvalidRequestError` if `echo` repeats more than an answer may hold."""
    if characters > MAX_ECHO:
        raise InvalidRequestError(
            f"echo would repeat {characters} characters and more, but an answer may repeat {MAX_ECHO}: "
            "lower n, or send fewer prompts at once",
            "echo",
        )


def text_of(prompt: Prompt, tokenizer: TokenizerLike) -> str:
    """Return the text of a prompt for `echo`, with special tokens only if the client sent them."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, False)


def operations(state: ServerState) -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/completions",
            Completions(state).create,
            "Continue prompts.",
            body=CompletionRequest,
            answer=CompletionBody,
            streams=True,
            refusals=ALL_ERRORS,
        )
    ]
