"""Renders a chat with the model's template, and says how its answers are to be read."""

from __future__ import annotations

from typing import Any

from aengine.http.endpoint import Endpoint, RenderedChat
from aengine.http.engine_like import EngineLike
from aengine.http.openai.messages import TemplateOptions, tools_for_template
from aengine.http.openai.tools import ToolUse
from aengine.requests.sampling_params import SamplingParams
from aengine.text.reading.answer_reading import AnswerReading


class ChatEndpoint(Endpoint):
    """The base of an endpoint that answers chats."""

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
        reading = self._reading(engine, tools, params, (options["template_kwargs"] or {}).get("enable_thinking"))
        offered = tools_for_template(tools.offered) if tools.offered else None
        prompt = await engine.encode_chat(messages, tools=offered, context=context, **options)
        return RenderedChat(prompt.token_ids, prompt.opens_thought, reading)

    def _reading(
        self, engine: EngineLike, tools: ToolUse, params: SamplingParams, enable_thinking: object
    ) -> AnswerReading:
        """How the answers are read. enable_thinking: as the template gets it; None if the request does not say."""
        form = engine.answer_format
        return AnswerReading(
            self._state.config,
            form,
            tools.rules,
            may_think=form.may_think(enable_thinking),
            structured=params.structured,
        )
