"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError
from aengine.http import sse
from aengine.http.endpoint import Endpoint
from aengine.http.engine_like import StreamLike
from aengine.http.openai_dialect import OpenAIDialect
from aengine.http.prompt_wording import told_prompts
from aengine.http.structs import ChatRequest, UsageTold
from aengine.http.wording import chat_logprobs, usage_body
from aengine.types import Completion, Fragment

_decoder = msgspec.json.Decoder(ChatRequest)


class Chat(Endpoint):
    async def create(self, request: Request) -> Response:
        engine, body = await self._accept(request, _decoder)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        head = {
            "id": request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": self._state.check_model(body.model),
        }
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        usage_told = body.usage_told()
        params = body.params(engine.default_params, max_tokens=None, logprobs=_logprobs(body))
        stream = await engine.submit_chat(
            [message.for_template() for message in body.messages],
            params,
            tools=body.tools,
            template_kwargs=body.chat_template_kwargs,
            request_id=request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        if not body.stream:
            stream, prompt_of = told_prompts(stream, engine.tokenizer, body.prompt_logprobs)
            return self._whole(stream, lambda completion: word_completion(head | prompt_of(0), completion))
        return self._stream(stream, ChatDialect(head, stream, usage_told, params.n))


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


class ChatDialect(OpenAIDialect):
    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_told: UsageTold, n: int) -> None:
        super().__init__(head, stream, usage_told)
        self._n = n

    def opening(self) -> bytes:
        """The role, once per choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            sse.event(self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))
            for index in range(self._n)
        )

    def _piece(self, index: int, text: str, fragment: Fragment | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": chat_logprobs(fragment.logprobs) if fragment is not None else None,
            "finish_reason": fragment.finish_reason if fragment is not None else None,
        }


def word_completion(head: dict[str, Any], completion: Completion) -> bytes:
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for choice in completion.choices
    ]
    return sse.encode({**head, "choices": choices, "usage": usage_body(completion.usage)})
