"""What is looked for in the answer to one request: thoughts, and calls of the tools that it offers."""

from __future__ import annotations

import msgspec

from aengine.config import ServerConfig
from aengine.errors import InvalidRequestError
from aengine.http.tool_use import ToolUse
from aengine.structured import Structured, Thought
from aengine.text.answer import AnswerFormat, AnswerParser
from aengine.text.reasoning import ThoughtParser
from aengine.text.tool_calls import ToolCallParser
from aengine.text.tool_grammar import tool_grammar
from aengine.text.tool_syntax import SYNTAXES, CallSyntax
from aengine.types import SamplingParams


class AnswerReading:
    """The model's format, as far as the server's knobs leave it, and the request's tools.

    `may_think` is False where the request keeps the model from thinking. `formed`: the request has given the answer
    a form, so that behind a thought it is content and nothing else, unless calls are forced.
    """

    def __init__(
        self,
        config: ServerConfig,
        answer_format: AnswerFormat,
        tools: ToolUse,
        *,
        may_think: bool = True,
        formed: bool = False,
    ) -> None:
        self._format = answer_format
        self._tools = tools
        self._may_think = may_think
        self._thoughts = answer_format.thoughts if config.reasoning == "auto" else config.reasoning == "think"
        call_format = answer_format.calls if config.tool_format == "auto" else config.tool_format
        self._syntax: CallSyntax | None = None
        if call_format is not None and call_format != "off" and tools.callable_tools:
            self._syntax = SYNTAXES[call_format]
        if tools.forced and self._syntax is None:
            raise InvalidRequestError(
                "tool_choice: this model's way to call tools is not known, so that it cannot be made to; "
                "the server's knob tool_format names it",
                "tool_choice",
            )
        self._formed = formed and not tools.forced
        if self._formed:
            self._syntax = None

    def asked(self, params: SamplingParams, opens_thought: bool) -> SamplingParams:
        """What the engine is asked for: markers that can be seen, and a grammar where calls are bound to a form."""
        markers = self._format.shown_special_ids(self._thoughts, self._syntax)
        structured = params.structured
        if (grammar := self.calls_grammar(opens_thought)) is not None:
            structured = Structured(grammar=grammar, origin="tools")
        elif structured is not None and self._thoughts:
            structured = msgspec.structs.replace(structured, thought=self._thought(opens_thought))
        return msgspec.structs.replace(
            params, shown_special_ids=(*params.shown_special_ids, *markers), structured=structured
        )

    def calls_grammar(self, opens_thought: bool) -> str | None:
        """The grammar, in Lark's notation, of an answer that must call tools, or whose calls, if there are any, must
        be right; None where neither is asked for.
        """
        functions = [tool.function for tool in self._tools.callable_tools]
        forced = self._tools.forced
        if self._syntax is None or not (forced or any(function.strict for function in functions)):
            return None
        return tool_grammar(
            {
                function.name: function.parameters if forced or function.strict else {"type": "object"}
                for function in functions
            },
            self._syntax,
            forced=forced,
            parallel=self._tools.parallel,
            thought=self._thought(opens_thought),
            special_tokens=self._format.special_markers,
        )

    def _thought(self, opens_thought: bool) -> Thought:
        if opens_thought:
            return "open"
        return "possible" if (self._thoughts or self._format.thoughts) and self._may_think else "never"

    def parser(self, opens_thought: bool) -> AnswerParser:
        """A parser for one answer. `opens_thought`: the prompt ends within a thought."""
        # What has a form and no thought before it may begin with anything, a marker too.
        thoughts = self._thoughts and not (self._formed and self._thought(opens_thought) == "never")
        return AnswerParser(
            ThoughtParser(opens_thought) if thoughts else None,
            ToolCallParser(self._syntax, self._tools.names, self._tools.parallel) if self._syntax is not None else None,
        )
