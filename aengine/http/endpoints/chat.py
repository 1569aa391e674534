"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http.bodies.chat import messages_for_template
from aengine.http.bodies.requests import ChatRequest, template_options
from aengine.http.endpoints.base import Endpoint
from aengine.http.openai.chunks import ChatChunkEncoder
from aengine.http.openai.tools import NO_TOOLS, tool_use
from aengine.http.openai.whole import chat_body
from aengine.http.streams.prompt_logprobs import with_prompt_logprobs

_decoder = msgspec.json.Decoder(ChatRequest)


class Chat(Endpoint):
    async def create(self, request: Request) -> Response:
        engine, body = await self._accept(request, _decoder)
        model = self._state.choose_model(body.model)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        head = {
            "id": request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
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
        chat = await self._submit_chat(
            engine,
            messages_for_template(body.messages),
            tool_use(body) if body.tools or body.tool_choice else NO_TOOLS,
            params,
            template_options(body),
            names=names,
            request_id=request_id,
            priority=body.priority,
            cache_salt=self._salt(request, body.cache_salt),
            adapter=model.adapter,
            streamed=bool(body.stream),
            last_tokens=body.truncate_prompt_tokens,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )
        prompt_ids = chat.token_ids if body.return_token_ids else None
        if body.stream:
            encoder = ChatChunkEncoder(head, chat.stream, usage_shown, chat.readers, chat.logprobs, prompt_ids)
            return self._stream(chat.stream, encoder)
        stream, prompt_logprobs_of = with_prompt_logprobs(chat.stream, engine.tokenizer, body.prompt_logprobs)
        return self._whole(
            stream,
            lambda completion: chat_body(
                head | prompt_logprobs_of(0), completion, chat.readers, chat.logprobs, prompt_ids
            ),
        )
