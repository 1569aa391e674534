"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.endpoint import Endpoint
from aengine.http.fields.messages import messages_for_template, template_options
from aengine.http.fields.tools import NO_TOOLS, ToolUse, choose_tools
from aengine.http.openai.bodies import ChatBody, ChatRequest
from aengine.http.openai.chunks import ChatChunkEncoder, call_body, delta_body, finish_reason
from aengine.http.openai.logprobs import ChatLogprobs, usage_body
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.http.streams.document import DocumentResponse
from aengine.http.streams.prompt_logprobs import with_prompt_logprobs
from aengine.http.streams.sse import EventStreamResponse
from aengine.text.answer.deltas import Answer, ReasoningDelta, join_deltas
from aengine.text.answer.reader import Reader
from aengine.types import Choice, Completion

_decoder = msgspec.json.Decoder(ChatRequest)


class Chat(Endpoint):
    async def create(self, request: Request) -> Response:
        parsed = await self._read_request(request, _decoder)
        engine, body = parsed.engine, parsed.body
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        head = {
            "id": request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": parsed.model.name,
        }
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        usage_shown = body.usage_shown()
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        params = body.params(
            engine.default_params, max_tokens=None, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        messages, options = messages_for_template(body.messages, engine), template_options(body)
        tools = tool_use(body) if body.tools or body.tool_choice else NO_TOOLS
        context = engine.max_model_len if body.truncate_prompt_tokens is None else None
        with renamed_param(names):
            budget = self._candidate_budget(engine, params, copies=1, streamed=bool(body.stream))
            chat = await self._render(engine, messages, tools, params, options, context)
            submitted = await self._submit(
                parsed, chat, params, request_id, budget=budget, last_tokens=body.truncate_prompt_tokens
            )
        logprobs = None
        if params.logprobs is not None:
            logprobs = ChatLogprobs(engine.tokenizer.token_bytes, bool(body.return_tokens_as_token_ids))
        readers = submitted.readers
        prompt_ids = submitted.prompt if body.return_token_ids and not isinstance(submitted.prompt, str) else None
        if body.stream:
            encoder = ChatChunkEncoder(head, submitted.stream, usage_shown, readers, logprobs, prompt_ids)
            return EventStreamResponse(submitted.stream, encoder, self._state.config)
        stream, prompt_logprobs_of = with_prompt_logprobs(submitted.stream, engine.tokenizer, body.prompt_logprobs)
        return DocumentResponse(
            stream,
            lambda completion: chat_body(head | prompt_logprobs_of(0), completion, readers, logprobs, prompt_ids),
        )


def tool_use(body: ChatRequest) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `InvalidRequestError`, naming the field."""
    return choose_tools(body.tools or [], body.tool_choice, parallel=body.parallel_tool_calls is not False)


async def chat_body(
    head: dict[str, Any],
    completion: Completion,
    readers: Sequence[Reader],
    logprobs: ChatLogprobs | None,
    prompt_ids: Sequence[int] | None = None,
) -> object:
    """Return the body of an answer that is not streamed. prompt_ids: the prompt's ids, if the request asks for ids."""
    choices = [await _choice_body(choice, readers[choice.index], logprobs) for choice in completion.choices]
    if prompt_ids is not None:
        head = {**head, "prompt_token_ids": prompt_ids}
        for body, choice in zip(choices, completion.choices, strict=True):
            body["token_ids"] = choice.token_ids
    usage = usage_body(completion.usage, sum(reader.thought_tokens for reader in readers))
    return {**head, "choices": choices, "usage": usage}


async def _choice_body(choice: Choice, reader: Reader, logprobs: ChatLogprobs | None) -> dict[str, Any]:
    plain = reader.plain
    answer = join_deltas(await reader.read(choice))
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": answer.content, **({} if plain else _parts(answer))},
        "logprobs": None if logprobs is None else await logprobs.encoded_body(choice.logprobs),
        "finish_reason": finish_reason(choice.finish_reason, reader),
    }


def _parts(answer: Answer) -> dict[str, Any]:
    """Return the fields of a message that may have a thought and calls."""
    body: dict[str, Any] = {"content": answer.content or None}
    if answer.reasoning:
        body |= delta_body(ReasoningDelta(answer.reasoning))
    if answer.calls:
        body["tool_calls"] = [call_body(call) for call in answer.calls]
    return body


def operations(state: ServerState) -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/chat/completions",
            Chat(state).create,
            "The assistant's next message.",
            body=ChatRequest,
            answer=ChatBody,
            streams=True,
            refusals=ALL_ERRORS,
        )
    ]
