"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import renamed_param
from aengine.http.endpoint import Endpoint, json_response
from aengine.http.engine_like import EngineLike
from aengine.http.entry.context import context_of
from aengine.http.fields.image_sources import RequestImages
from aengine.http.fields.images import MediaRules, encode_chat
from aengine.http.fields.messages import template_options, tools_for_template
from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.responses.answer import InputTokens, ResponseBody, ResponseHead
from aengine.http.responses.bodies import ENCRYPTED, LOGPROBS, InputItem, Reasoning, ResponsesRequest
from aengine.http.responses.events import Keep, ResponseEventEncoder, keep_nothing, response_body
from aengine.http.responses.input import messages_of
from aengine.http.responses.items import Output
from aengine.http.responses.kept import KeptResponse, KeptResponses, encoded_input, items_of, kept_operations
from aengine.http.responses.tools import read_tools
from aengine.http.state import ServerState
from aengine.http.streams.document import DocumentResponse, document
from aengine.http.streams.sse import EventStreamResponse
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Completion

_NAMES = {"prompt": "input", "messages": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
_decoder = msgspec.json.Decoder(ResponsesRequest)


class Responses(Endpoint):
    def __init__(self, state: ServerState, kept: KeptResponses) -> None:
        super().__init__(state)
        self._kept = kept

    async def create(self, request: Request) -> Response:
        parsed = await self._read_request(request, _decoder)
        engine, body = parsed.engine, parsed.body
        body.refuse_unsupported()
        caller = context_of(request.scope).caller
        tools = read_tools(body)
        include = body.include or ()
        params = _params(engine, body)
        response_id = f"resp_{uuid.uuid4().hex}"
        kept = bool(self._kept.most) and body.store is not False
        keep = await self._keeper(body, response_id, caller) if kept else keep_nothing
        messages = await self._messages(engine, body, caller)
        with renamed_param(_NAMES):
            chat = await self._render(engine, messages, tools.use, params, template_options(body), engine.max_model_len)
            # Logprobs of a stream count as well, because its last events repeat all of them.
            budget = self._candidate_budget(engine, params, copies=1, streamed=False)
            stream, _, (reader,) = await self._submit(parsed, chat, params, response_id, budget=budget)
        head = ResponseHead(response_id, parsed.model.name, body, params, stored=kept)
        reasoning = body.reasoning or Reasoning()
        output = Output(
            summaries=(reasoning.summary or reasoning.generate_summary) is not None,
            encrypted=ENCRYPTED in include,
            called=tools.called,
            logprobs=None if params.logprobs is None else ChatLogprobs(engine.tokenizer.token_bytes),
        )
        if params.logprobs is not None:
            reader.attach_logprobs()
        if body.stream:
            return EventStreamResponse(stream, ResponseEventEncoder(head, output, reader, keep), self._state.config)

        async def whole(completion: Completion) -> object:
            answer = await response_body(head, completion, output, reader)
            keep(answer)
            return answer

        return DocumentResponse(stream, whole)

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of the prompt that the same request would have, however long."""
        engine, body, _, _ = await self._read_request(request, _decoder)
        body.refuse_unsupported()
        tools = tools_for_template(read_tools(body).use.offered)
        with renamed_param(_NAMES):
            _params(engine, body).validate(engine.vocab_size)  # a request that is refused has no prompt to count
            prompt = await encode_chat(
                engine,
                RequestImages(self._state.image_loader),
                await self._messages(engine, body, context_of(request.scope).caller),
                tools=tools,
                **template_options(body),
            )
        return json_response(InputTokens(len(prompt.token_ids)))

    async def _messages(self, engine: EngineLike, body: ResponsesRequest, caller: str | None) -> list[dict[str, Any]]:
        """Return the messages of the conversation: kept turns and the request's input."""
        items = _items(body)
        previous = body.previous_response_id
        earlier = None if previous is None else items_of(self._kept.turns(caller, previous))
        rules = MediaRules(engine.no_images, engine.images_in_results)
        return await messages_of(body.instructions, items, rules, earlier)

    async def _keeper(self, body: ResponsesRequest, response_id: str, caller: str | None) -> Keep:
        """Return a function that keeps the finished response. Input items without an id get one, for lists."""
        items = _items(body)
        request_id = uuid.uuid4().hex
        for index, item in enumerate(items):
            item.id = item.id or f"{_prefix(item)}_{request_id}{index:x}"
        given = await encoded_input(items)

        def keep(answer: dict[str, Any]) -> None:
            response = b"".join(document(answer))
            self._kept.keep(caller, KeptResponse(response_id, body.previous_response_id, given, len(items), response))

        return keep


def _params(engine: EngineLike, body: ResponsesRequest) -> SamplingParams:
    return body.params(
        engine.default_params,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        structured=body.structured(),
    )


def _items(body: ResponsesRequest) -> list[InputItem]:
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def _prefix(item: InputItem) -> str:
    """Return the prefix of an item's id."""
    return {"reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}.get(
        item.type or "", "msg" if item.type in (None, "message") else "out"
    )


def operations(state: ServerState) -> list[Operation]:
    kept = KeptResponses(state.config.kept_responses, state.config.kept_response_bytes)
    responses = Responses(state, kept)
    return [
        Operation(
            "POST",
            "/v1/responses",
            responses.create,
            "A response to a conversation.",
            body=ResponsesRequest,
            answer=ResponseBody,
            streams=True,
            refusals=ALL_ERRORS,
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            responses.count,
            "The number of tokens of a response's prompt.",
            body=ResponsesRequest,
            answer=InputTokens,
            refusals=ALL_ERRORS,
        ),
        *kept_operations(kept),
    ]
