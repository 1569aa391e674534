"""What endpoints have in common: a request is decoded, an answer bounded, a response made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.bodies.chat import tools_for_template
from aengine.http.bodies.requests import TemplateOptions
from aengine.http.door.auth import CALLER
from aengine.http.door.body import FIELDS, LARGE, decode
from aengine.http.endpoints.candidates import CandidateBudget
from aengine.http.endpoints.prompts import Prompt, cut
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.openai.tools import ToolUse
from aengine.http.state import ServerState
from aengine.http.streams import sse
from aengine.http.streams.document import DocumentResponse
from aengine.http.streams.sse import EventEncoder, EventStreamResponse
from aengine.requests.sampling_params import SamplingParams
from aengine.text.reading.answer_reading import AnswerReading, ChoiceReader
from aengine.types import Completion

_MOST_FIELDS = 1000  # of a body; no API has a tenth of them, and each is looked up

T = TypeVar("T", bound=msgspec.Struct)


class SubmittedChat(NamedTuple):
    """A chat that the engine answers: one reader a choice, and the form of logprobs where they were asked for."""

    stream: StreamLike
    readers: list[ChoiceReader]
    logprobs: ChatLogprobs | None
    token_ids: Sequence[int]  # of the prompt


class Endpoint:
    """The base of an endpoint that generates."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def _accept(self, request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[EngineLike, T]:
        """Decode the request: the engine and the body, refused in this order: unreadable, no engine, invalid."""
        body = await self._state.bodies.read(request)
        await self._state.turnstile.enter()
        engine, read = self._state.require_engine(), decode(body, decoder)
        if len(body) > LARGE:
            await asyncio.sleep(0)  # that took a while, and so will the rest
        fields = decode(body, FIELDS)
        if len(fields) > _MOST_FIELDS:
            raise InvalidRequestError(f"the body has {len(fields)} fields, and at most {_MOST_FIELDS} are looked at")
        if "structured_outputs" in fields or not fields.keys() <= set(read.__struct_fields__):
            self._state.unknown_fields.check(fields, type(read), request.scope["path"])
        return engine, read

    def _reading(
        self, engine: EngineLike, tools: ToolUse, params: SamplingParams, options: TemplateOptions
    ) -> AnswerReading:
        """How the answers of a chat are read."""
        form = engine.answer_format
        may_think = form.may_think((options["template_kwargs"] or {}).get("enable_thinking"))
        return AnswerReading(self._state.config, form, tools.rules, may_think=may_think, structured=params.structured)

    async def _submit_chat(
        self,
        engine: EngineLike,
        messages: list[dict[str, Any]],
        tools: ToolUse,
        params: SamplingParams,
        options: TemplateOptions,
        *,
        names: Mapping[str, str],
        request_id: str,
        priority: int | None,
        cache_salt: str | None,
        adapter: str | None,
        streamed: bool,
        last_tokens: int | None = None,
        tokens_as_ids: bool = False,
    ) -> SubmittedChat:
        """Render a chat and enqueue it, with readers for its answers. `names` are the request's names for parameters of
        the engine; of the prompt only the `last_tokens` are kept. tokens_as_ids: as logprobs tell them.

        Raises `InvalidRequestError`, `QueueFullError` and their like.
        """
        reading = self._reading(engine, tools, params, options)
        with renamed_param(names):
            prompt = await engine.encode_chat(
                messages,
                tools=tools_for_template(tools.offered) if tools.offered else None,
                context=engine.max_model_len if last_tokens is None else None,
                **options,
            )
            token_ids: Prompt = prompt.token_ids
            if last_tokens is not None:
                token_ids = await cut(token_ids, last_tokens, engine.tokenizer)
            if params.logprobs is not None or params.prompt_logprobs is not None:
                budget = self._candidates(engine, params, copies=1, streamed=streamed)
                token_ids, params = await budget.add(token_ids)
            stream = await engine.submit_within_context(
                token_ids,
                reading.engine_params(params, prompt.opens_thought),
                request_id=request_id,
                priority=priority or 0,
                cache_salt=cache_salt,
                adapter=adapter,
            )
        bytes_of = engine.tokenizer.token_bytes
        readers = list(map(reading.reader, repeat(prompt.opens_thought, params.n), repeat(bytes_of)))
        logprobs = None if params.logprobs is None else ChatLogprobs(bytes_of, tokens_as_ids)
        assert not isinstance(token_ids, str)
        return SubmittedChat(stream, readers, logprobs, token_ids)

    def _candidates(self, engine: EngineLike, params: SamplingParams, **counts: Any) -> CandidateBudget:
        return CandidateBudget(self._state.config.max_answer_candidates, engine, params, **counts)

    def _salt(self, request: Request, own: str | None) -> str | None:
        """The request's cache salt, `own` if it has one, apart from those of other API keys if the server's knob or
        several keys ask for that.
        """
        config, caller = self._state.config, request.scope.get(CALLER)
        apart = len(set(config.api_keys)) > 1 if config.salt_by_key is None else config.salt_by_key
        return f"{caller}/{own or ''}" if apart and caller is not None else own

    def _stream(self, stream: StreamLike, encoder: EventEncoder) -> Response:
        config = self._state.config
        return EventStreamResponse(stream, encoder, heartbeat=config.heartbeat, max_backlog=config.max_stream_backlog)

    def _whole(self, stream: StreamLike, body_of: Callable[[Completion], Awaitable[object]]) -> Response:
        return DocumentResponse(stream, body_of)


def json_response(payload: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose body is the payload, a struct or what JSON knows, encoded."""
    return Response(sse.encode(payload), status, headers, "application/json")
