"""The base of the endpoints with a JSON body: it reads a request, renders a chat and submits the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.entry.body import FIELDS, LARGE, decode
from aengine.http.entry.context import context_of
from aengine.http.fields.image_sources import RequestImages
from aengine.http.fields.images import encode_chat
from aengine.http.fields.messages import tools_for_template
from aengine.http.fields.prompts import CandidateBudget, Prompt, keep_last_tokens
from aengine.http.fields.tools import ToolUse
from aengine.http.fields.unknown import NESTED, RequestBody
from aengine.http.state import ChosenModel, ServerState
from aengine.http.streams import sse
from aengine.prompt_images import PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.reader import Reader
from aengine.text.reading import AnswerReading
from aengine.text.template.messages import TemplateOptions

_MOST_FIELDS = 1000  # in a body; every API has fewer than 100

T = TypeVar("T", bound=RequestBody)


class ParsedRequest(NamedTuple, Generic[T]):
    """A request whose body has been read, and the model that answers it."""

    engine: EngineLike
    body: T
    model: ChosenModel
    cache_salt: str | None


class RenderedChat(NamedTuple):
    """A chat as a prompt, and the settings for reading its answers."""

    token_ids: list[int]
    opens_thought: bool  # the answer begins within a thought
    reading: AnswerReading
    images: PromptImages | None  # among the ids


class SubmittedRequest(NamedTuple):
    """A request that has been submitted to the engine."""

    stream: StreamLike
    prompt: Prompt  # as text, or as ids if they were needed
    readers: list[Reader]  # one for each choice of a chat; empty for other prompts


class Endpoint:
    """The base of an endpoint with a JSON body."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def _read_request(self, request: Request, decoder: msgspec.json.Decoder[T]) -> ParsedRequest[T]:
        """Read and check the request. The checks come in this order: readable, engine ready, valid, known model."""
        data = await self._state.bodies.read(request)
        await self._state.iteration_limiter.enter()
        engine, body = self._state.require_engine(), decode(data, decoder)
        if len(data) > LARGE:
            await asyncio.sleep(0)  # let other tasks run, because decoding took a while and the checks below do as well
        fields = decode(data, FIELDS)
        if len(fields) > _MOST_FIELDS:
            raise InvalidRequestError(f"the body has {len(fields)} fields; at most {_MOST_FIELDS} are allowed")
        if not fields.keys() <= set(body.__struct_fields__) or not NESTED.isdisjoint(fields):
            self._state.unknown_fields.check(fields, type(body), request.scope["path"])
        model = self._state.choose_model(body.model)
        config, caller, salt = self._state.config, context_of(request.scope).caller, getattr(body, "cache_salt", None)
        salt_by_key = len(set(config.api_keys)) > 1 if config.salt_by_key is None else config.salt_by_key
        if salt_by_key and caller is not None:
            salt = f"{caller}/{salt or ''}"
        return ParsedRequest(engine, body, model, salt)

    async def _render(
        self,
        engine: EngineLike,
        messages: list[dict[str, Any]],
        tools: ToolUse,
        params: SamplingParams,
        options: TemplateOptions,
        context: int | None,
    ) -> RenderedChat:
        """Render and tokenize a chat.

        Raises `InvalidRequestError`, and `ContextLengthError` for `context` tokens or more.
        """
        reading = self._reading(engine, tools, params, (options.get("template_kwargs") or {}).get("enable_thinking"))
        offered = tools_for_template(tools.offered) if tools.offered else None
        images = RequestImages(self._state.image_loader)
        prompt = await encode_chat(engine, images, messages, tools=offered, context=context, **options)
        return RenderedChat(prompt.token_ids, prompt.opens_thought, reading, prompt.images)

    def _reading(
        self, engine: EngineLike, tools: ToolUse, params: SamplingParams, enable_thinking: object
    ) -> AnswerReading:
        """Return the settings for reading the answers. enable_thinking: the template's variable; None: not set."""
        form = engine.answer_format
        return AnswerReading(
            self._state.config,
            form,
            tools.rules,
            may_think=form.may_think(enable_thinking),
            structured=params.structured,
        )

    async def _submit(
        self,
        parsed: ParsedRequest[Any],
        prompt: Prompt | RenderedChat,
        params: SamplingParams,
        request_id: str,
        *,
        budget: CandidateBudget | None = None,
        last_tokens: int | None = None,
        clip: bool = True,
    ) -> SubmittedRequest:
        """Submit a prompt to the engine. Every request that generates text calls this method.

        last_tokens: keep only this many of the prompt's last tokens.
        clip: reduce max_tokens to the space that the prompt leaves in the context, instead of refusing it.
        Raises `InvalidRequestError`, `ContextLengthError` or `QueueFullError`.
        """
        engine = parsed.engine
        chat = prompt if isinstance(prompt, RenderedChat) else None
        text_or_ids: Prompt = prompt.token_ids if isinstance(prompt, RenderedChat) else prompt
        images = None if chat is None else chat.images
        if last_tokens is not None and images is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens: a prompt with images cannot be cut; leave it out", "truncate_prompt_tokens"
            )
        if last_tokens is not None:
            text_or_ids = await keep_last_tokens(text_or_ids, last_tokens, engine.tokenizer)
        if budget is not None:
            text_or_ids, params = await budget.add(text_or_ids)
        if chat is not None:
            params = chat.reading.engine_params(params, chat.opens_thought)
        stream = await engine.submit(
            text_or_ids,
            params,
            request_id=request_id,
            priority=getattr(parsed.body, "priority", None) or 0,
            cache_salt=parsed.cache_salt,
            adapter=parsed.model.adapter,
            clip=clip,
            images=images,
        )
        readers: list[Reader] = []
        if chat is not None:
            bytes_of = engine.tokenizer.token_bytes
            readers = [chat.reading.reader(chat.opens_thought, bytes_of) for _ in range(params.n)]
        return SubmittedRequest(stream, text_or_ids, readers)

    def _candidate_budget(self, engine: EngineLike, params: SamplingParams, **counts: Any) -> CandidateBudget | None:
        """Return the bound on an answer's logprobs; None if the request asks for none."""
        if params.logprobs is None and params.prompt_logprobs is None:
            return None
        return CandidateBudget(self._state.config.max_answer_candidates, engine, params, **counts)


def json_response(payload: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with the payload as JSON."""
    return Response(sse.encode(payload), status, headers, "application/json")
