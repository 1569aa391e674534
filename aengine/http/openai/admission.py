"""Admission of a chat: its prompt is rendered and enqueued, and readers are made for its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from aengine.errors import renamed_param
from aengine.http.endpoint import Endpoint
from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.fields.prompts import Prompt, cut
from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.openai.messages import TemplateOptions, tools_for_template
from aengine.http.openai.tools import ToolUse
from aengine.requests.sampling_params import SamplingParams
from aengine.text.reading.answer_reading import AnswerReading, ChoiceReader


class SubmittedChat(NamedTuple):
    """A chat that the engine answers: one reader a choice, and the form of logprobs where they were asked for."""

    stream: StreamLike
    readers: list[ChoiceReader]
    logprobs: ChatLogprobs | None
    token_ids: Sequence[int]  # of the prompt


class ChatEndpoint(Endpoint):
    """The base of an endpoint that answers chats."""

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
