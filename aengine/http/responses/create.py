"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import renamed_param
from aengine.http.door.auth import CALLER
from aengine.http.endpoint import json_response
from aengine.http.openai.admission import ChatEndpoint
from aengine.http.openai.messages import template_options, tools_for_template
from aengine.http.operation import ANSWERS, Operation
from aengine.http.responses.answer import InputTokens, ResponseBody, ResponseHead
from aengine.http.responses.bodies import ENCRYPTED, LOGPROBS, InputItem, Reasoning, ResponsesRequest
from aengine.http.responses.events import Keep, ResponseEventEncoder, keep_nothing
from aengine.http.responses.input import messages_of
from aengine.http.responses.items import Output
from aengine.http.responses.kept import KeptResponse, KeptResponses, encoded_input, items_of, kept_operations
from aengine.http.responses.logprobs import MessageLogprobs
from aengine.http.responses.tools import read_tools
from aengine.http.responses.whole import response_body
from aengine.http.state import ServerState
from aengine.http.streams.document import document
from aengine.types import Completion

_NAMES = {"prompt": "input", "messages": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
_decoder = msgspec.json.Decoder(ResponsesRequest)


class Responses(ChatEndpoint):
    def __init__(self, state: ServerState, kept: KeptResponses) -> None:
        super().__init__(state)
        self._kept = kept

    async def create(self, request: Request) -> Response:
        engine, body = await self._accept(request, _decoder)
        model = self._state.choose_model(body.model)
        body.refuse_unsupported()
        caller: str | None = request.scope.get(CALLER)
        tools = read_tools(body)
        include = body.include or ()
        params = body.params(
            engine.default_params,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if LOGPROBS in include else None,
            structured=body.structured(),
        )
        response_id = f"resp_{uuid.uuid4().hex}"
        kept = bool(self._kept.most) and body.store is not False
        keep = await self._keeper(body, response_id, caller) if kept else keep_nothing
        chat = await self._submit_chat(
            engine,
            await self._messages(body, caller),
            tools.use,
            params,
            template_options(body),
            names=_NAMES,
            request_id=response_id,
            priority=body.priority,
            cache_salt=self._salt(request, body.cache_salt),
            adapter=model.adapter,
            streamed=False,  # the last events of a stream have them once more
        )
        head = ResponseHead(response_id, model.name, body, params, stored=kept)
        reasoning = body.reasoning or Reasoning()
        output = Output(
            summaries=(reasoning.summary or reasoning.generate_summary) is not None,
            encrypted=ENCRYPTED in include,
            called=tools.called,
        )
        (reader,) = chat.readers
        logprobs = None if chat.logprobs is None else MessageLogprobs(chat.logprobs, reader.thought)
        if body.stream:
            return self._stream(chat.stream, ResponseEventEncoder(head, output, reader, logprobs, keep))

        async def whole(completion: Completion) -> object:
            answer = await response_body(head, completion, output, reader, logprobs)
            keep(answer)
            return answer

        return self._whole(chat.stream, whole)

    async def count(self, request: Request) -> Response:
        """The length of the prompt that the same request would make, however long."""
        engine, body = await self._accept(request, _decoder)
        self._state.choose_model(body.model)
        body.refuse_unsupported()
        offered = read_tools(body).use.offered
        with renamed_param(_NAMES):
            prompt = await engine.encode_chat(
                await self._messages(body, request.scope.get(CALLER)),
                tools=tools_for_template(offered) if offered else None,
                **template_options(body),
            )
        return json_response(InputTokens(len(prompt.token_ids)))

    async def _messages(self, body: ResponsesRequest, caller: str | None) -> list[dict[str, Any]]:
        """The conversation: what is kept of it, and the request's input."""
        items = _items(body)
        earlier: list[InputItem] = []
        if body.previous_response_id is not None:
            earlier = await items_of(self._kept.turns(caller, body.previous_response_id, "previous_response_id"))
        return await messages_of(body.instructions, items, earlier)

    async def _keeper(self, body: ResponsesRequest, response_id: str, caller: str | None) -> Keep:
        """What keeps the response once it is finished. Items of its input get ids, by which they are listed."""
        items = _items(body)
        request_id = uuid.uuid4().hex
        for index, item in enumerate(items):
            item.id = item.id or f"{_prefix(item)}_{request_id}{index:x}"
        given = await encoded_input(items)

        def keep(answer: dict[str, Any]) -> None:
            response = b"".join(document(answer))
            self._kept.keep(caller, KeptResponse(response_id, body.previous_response_id, given, len(items), response))

        return keep


def _items(body: ResponsesRequest) -> list[InputItem]:
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def _prefix(item: InputItem) -> str:
    """The beginning of an item's id."""
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
            "A response to a conversation's items.",
            body=ResponsesRequest,
            answer=ResponseBody,
            streams=True,
            refusals=ANSWERS,
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            responses.count,
            "The length of its prompt.",
            body=ResponsesRequest,
            answer=InputTokens,
            refusals=ANSWERS,
        ),
        *kept_operations(kept),
    ]
