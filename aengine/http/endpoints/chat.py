"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from itertools import repeat

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.bodies.chat import messages_for_template, tools_for_template
from aengine.http.bodies.requests import ChatRequest, template_options
from aengine.http.endpoints.base import Endpoint
from aengine.http.endpoints.prompts import Prompt, cut
from aengine.http.openai.chat import ChatChunkEncoder, chat_body
from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.openai.reading import AnswerReading
from aengine.http.openai.tools import NO_TOOLS, tool_use
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
        tools = tool_use(body) if body.tools or body.tool_choice else NO_TOOLS
        options = template_options(body)
        enable_thinking = (options["template_kwargs"] or {}).get("enable_thinking")
        reading = AnswerReading(
            self._state.config,
            engine.answer_format,
            tools,
            may_think=not engine.answer_format.thinking_is_opt_in if enable_thinking is None else bool(enable_thinking),
            structured=params.structured,
        )
        prompt = await engine.encode_chat(
            messages_for_template(body.messages),
            tools=tools_for_template(tools.offered) if tools.offered else None,
            context=engine.max_model_len if body.truncate_prompt_tokens is None else None,
            **options,
        )
        token_ids: Prompt = prompt.token_ids
        if body.truncate_prompt_tokens is not None:
            token_ids = await cut(token_ids, body.truncate_prompt_tokens, engine.tokenizer)
        with renamed_param(names):
            if params.logprobs is not None or params.prompt_logprobs is not None:
                budget = self._candidates(engine, params, copies=1, streamed=bool(body.stream))
                token_ids, params = await budget.add(token_ids)
            stream = await engine.submit(
                token_ids,
                reading.engine_params(params, prompt.opens_thought),
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                adapter=model.adapter,
            )

        bytes_of = engine.tokenizer.token_bytes
        readers = list(map(reading.reader, repeat(prompt.opens_thought, params.n), repeat(bytes_of)))
        logprobs = None if params.logprobs is None else ChatLogprobs(bytes_of)
        if body.stream:
            return self._stream(stream, ChatChunkEncoder(head, stream, usage_shown, readers, logprobs))
        stream, prompt_logprobs_of = with_prompt_logprobs(stream, engine.tokenizer, body.prompt_logprobs)
        return self._whole(
            stream, lambda completion: chat_body(head | prompt_logprobs_of(0), completion, readers, logprobs)
        )
