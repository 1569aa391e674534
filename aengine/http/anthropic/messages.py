"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import ContextLengthError, InvalidRequestError, renamed_param
from aengine.http.anthropic.answer import AnswerPlan, message_body
from aengine.http.anthropic.bodies import CountTokensRequest, MessageBody, MessagesRequest, TokenCount
from aengine.http.anthropic.events import MessageEventEncoder
from aengine.http.anthropic.prompt import chat_messages, has_late_system
from aengine.http.anthropic.tools import tool_use_of
from aengine.http.endpoint import Endpoint, RenderedChat, json_response
from aengine.http.engine_like import EngineLike
from aengine.http.entry.errors import OVERLOADED, MessagesErrorBody
from aengine.http.fields.image_sources import RequestImages
from aengine.http.fields.images import MediaRules, encode_chat
from aengine.http.fields.messages import tools_for_template
from aengine.http.fields.tools import ToolUse
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.http.streams.document import DocumentResponse
from aengine.http.streams.sse import EventStreamResponse
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.text.answer.parser import ChatPrompt

_MANY = 2000  # blocks; converting them takes about 10 ms
_NAMES = {"prompt": "messages", "stop": "stop_sequences"}
_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


class Messages(Endpoint):
    async def create(self, request: Request) -> Response:
        """Return the assistant's next message."""
        parsed = await self._read_request(request, _decoder)
        engine, body = parsed.engine, parsed.body
        plan = AnswerPlan(
            id=f"msg_{uuid.uuid4().hex}",
            model=parsed.model.name,
            max_tokens=body.max_tokens,
            shows_thoughts=body.thinking is None or body.thinking.display != "omitted",
        )
        params = _params(body, engine.default_params)
        tools = tool_use_of(body)
        reading = self._reading(engine, tools, params, _enable_thinking(body))
        prompt = await self._prompt(engine, body, tools, engine.max_model_len)
        chat = RenderedChat(prompt.token_ids, prompt.opens_thought, reading, prompt.images)
        with renamed_param(_NAMES):
            stream, _, (reader,) = await self._submit(parsed, chat, params, plan.id)
        if body.stream:
            return EventStreamResponse(stream, MessageEventEncoder(plan, stream, reader), self._state.config)
        return DocumentResponse(stream, lambda completion: message_body(plan, completion, reader))

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of the prompt that the same request would have, however long."""
        engine, body, _, _ = await self._read_request(request, _count_decoder)
        prompt = await self._prompt(engine, body, tool_use_of(body), None)
        return json_response(TokenCount(len(prompt.token_ids)))

    async def _prompt(
        self, engine: EngineLike, body: CountTokensRequest, tools: ToolUse, context: int | None
    ) -> ChatPrompt:
        """Render and tokenize. Raises `InvalidRequestError`, and `ContextLengthError` for `context` tokens or more."""
        rules = MediaRules(engine.no_images, engine.images_in_results)
        images = RequestImages(self._state.image_loader)
        try:
            return await self._rendered(engine, images, await _chat(body, rules, "system"), body, tools, context)
        except ContextLengthError:
            raise
        except InvalidRequestError:  # the template may allow system messages only at the beginning
            if not has_late_system(body):
                raise
            return await self._rendered(engine, images, await _chat(body, rules, "user"), body, tools, context)

    async def _rendered(
        self,
        engine: EngineLike,
        images: RequestImages,
        messages: list[dict[str, Any]],
        body: CountTokensRequest,
        tools: ToolUse,
        context: int | None,
    ) -> ChatPrompt:
        kwargs: dict[str, Any] = {}
        if (thinks := _enable_thinking(body)) is not None:
            kwargs["enable_thinking"] = thinks
        if body.output_config is not None and body.output_config.effort is not None:
            kwargs["reasoning_effort"] = body.output_config.effort
        with renamed_param({"prompt": "messages", "continue_final_message": "messages"}):
            return await encode_chat(
                engine,
                images,
                messages,
                tools=tools_for_template(tools.offered),
                template_kwargs=kwargs or None,
                continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
                context=context,
            )


async def _chat(body: CountTokensRequest, rules: MediaRules, late_system: str) -> list[dict[str, Any]]:
    """Call `chat_messages`, in a thread if many blocks would block the loop."""
    contents = [body.system or "", *(message.content for message in body.messages)]
    blocks = sum(1 if isinstance(content, str) else len(content) for content in contents)
    make = partial(chat_messages, body, rules, late_system=late_system)
    return make() if blocks < _MANY else await anyio.to_thread.run_sync(make)


def _enable_thinking(body: CountTokensRequest) -> bool | None:
    """Return whether the request enables thinking; None leaves it to the model's template."""
    return None if body.thinking is None else body.thinking.type in ("enabled", "adaptive")


def _params(body: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the request's sampling parameters, with the checkpoint's as defaults."""
    fields: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "speculation"):
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    if body.stop_sequences:
        fields["stop"] = tuple(body.stop_sequences)
    for origin, form in (
        ("output_config.format", None if body.output_config is None else body.output_config.format),
        ("output_format", body.output_format),
    ):
        if form is not None:
            fields["structured"] = Structured(json=form.schema, origin=origin)
    return msgspec.structs.replace(defaults, **fields, max_tokens=body.max_tokens or 1)


def operations(state: ServerState) -> list[Operation]:
    messages = Messages(state)
    return [
        Operation(
            "POST",
            "/v1/messages",
            messages.create,
            "The assistant's next message, in Anthropic's format.",
            body=MessagesRequest,
            answer=MessageBody,
            streams=True,
            refusals=(*ALL_ERRORS, OVERLOADED),
            error=MessagesErrorBody,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "The number of tokens of a message's prompt.",
            body=CountTokensRequest,
            answer=TokenCount,
            refusals=ALL_ERRORS,
            error=MessagesErrorBody,
        ),
    ]
