"""Decides how the answers of one request are read and constrained.

The request's tools, the model's format and the server's knobs become a reader and sampling parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from aengine.config import ServerConfig
from aengine.errors import InvalidRequestError
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured, Thought
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.formats.base import CallableTool, CallFormat, Tools
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.harmony import FURTHER_THOUGHT, STOPS, HarmonyParser
from aengine.text.answer.parser import AnswerFormat, AnswerParser
from aengine.text.answer.reader import Reader
from aengine.text.answer.thought import ThoughtParser, ThoughtTokenCounter
from aengine.text.answer.unclosed_thought import UnclosedThought
from aengine.text.grammar.calls import CallGrammar
from aengine.text.grammar.harmony import HarmonyGrammar


class CallRules(NamedTuple):
    """The tools that a model may call.

    forced: the model must call one. parallel: it may call several. narrowed: it sees more tools than it may call.
    """

    tools: tuple[CallableTool, ...] = ()
    forced: bool = False
    parallel: bool = True
    narrowed: bool = False

    @property
    def strict(self) -> bool:
        """Whether the arguments of some tool must match its schema."""
        return any(tool.strict for tool in self.tools)

    @property
    def constrain(self) -> bool:
        """Whether an answer must follow a grammar because of the tools."""
        return self.forced or self.narrowed or self.strict

    @property
    def schemas(self) -> Tools:
        """The tools' names, with the JSON schemas of their arguments."""
        return {tool.name: tool.parameters for tool in self.tools}


def call_rules(tools: Iterable[Mapping[str, Any]]) -> CallRules:
    """Return rules for tools in the notation of OpenAI's API; the model may call any of them.

    Tools in another notation, which a chat template may know, are left out.
    """
    found: dict[str, CallableTool] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            continue
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, Mapping) else None
        found[name] = CallableTool(name, schema, function.get("strict") is True, f"tools[{index}].function.parameters")
    return CallRules(tuple(found.values()))


class AnswerReading:
    """Makes the readers and the sampling parameters of one request.

    may_think: False if the request turns thinking off. structured: the form of the text after the thought. Calls may
    take its place if they cannot be mistaken for it.
    """

    def __init__(
        self,
        config: ServerConfig,
        answer_format: AnswerFormat,
        tools: CallRules,
        *,
        may_think: bool = True,
        structured: Structured | None = None,
    ) -> None:
        self._format = answer_format
        self._tools = tools
        self._may_think = may_think
        self._thoughts = answer_format.thoughts if config.reasoning == "auto" else config.reasoning == "think"
        call_format = answer_format.calls if config.tool_format == "auto" else config.tool_format
        self._calls: CallFormat | None = None
        self._harmony = answer_format.harmony
        reads_calls = bool(tools.tools) and config.tool_format != "off"
        self._harmony_calls = self._harmony and reads_calls
        if call_format is not None and call_format != "off" and reads_calls and not self._harmony:
            self._calls = FORMATS[call_format]
        if tools.forced and self._calls is None and not self._harmony_calls:
            why, remedy = "the format of this model's calls is unknown", "set the server's knob tool_format"
            if not answer_format.sees_tools:
                why, remedy = "the model's chat template has no place for tools", "serve it with another template"
            raise InvalidRequestError(f"tool_choice: {why}, so no call can be forced; {remedy}", "tool_choice")
        self._structured = structured is not None and not tools.forced
        # JSON never begins with a marker. Any other form may, and Llama 3's calls are JSON themselves.
        json = structured is not None and (structured.json is not None or structured.json_object)
        if self._structured and (not json or (self._calls is not None and self._calls.syntax.has_bare_calls)):
            self._calls = None

    def engine_params(self, params: SamplingParams, opens_thought: bool) -> SamplingParams:
        """Return `params` with visible markers, and with a grammar if the request constrains the answer."""
        markers = self._format.shown_special_ids(self._thoughts, self._calls)
        structured = params.structured
        if self._harmony:
            tokens = self._format.markers
            ends = tuple(tokens[stop] for stop in STOPS if stop in tokens and tokens[stop] not in params.stop_token_ids)
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
        if structured is not None and self._structured:
            grammar = self._grammar()
            calls = None if grammar is None else grammar.rules()
            structured = msgspec.structs.replace(structured, thought=self._thought(opens_thought), calls=calls)
        elif (self._calls or self._harmony_calls) and (source := self.calls_grammar(opens_thought)) is not None:
            structured = Structured(grammar=source, origin="tools")
        if params.stop and self._tools.forced:
            params = msgspec.structs.replace(params, stop=())  # the whole answer is calls
        if params.stop and not params.stop_in_thought and self._thoughts:
            begin, end = self._format.thought_markers
            again = (FURTHER_THOUGHT,) if self._harmony else ()
            params = msgspec.structs.replace(params, unstopped=("" if opens_thought else begin, end, *again))
        if structured is not None:  # if a marker were hidden, the texts around it would join
            markers = tuple(self._format.markers[marker] for marker in sorted(self._format.special_markers))
        return msgspec.structs.replace(
            params, shown_special_ids=(*params.shown_special_ids, *markers), structured=structured
        )

    def calls_grammar(self, opens_thought: bool) -> str | None:
        """Return the grammar, in Lark's notation, of an answer whose calls are constrained; None if they are free."""
        tools, grammar = self._tools, self._grammar()
        if grammar is None:
            return None
        thought = self._thought(opens_thought)
        if tools.forced:
            return grammar.forced() if isinstance(grammar, HarmonyGrammar) else grammar.forced(thought)
        if not tools.constrain:
            return None
        if isinstance(grammar, HarmonyGrammar):
            return grammar.free()
        if self._thoughts and thought == "never":
            thought = "possible"  # free text may begin with a thought, which is then read as one
        return grammar.within_text(thought)

    def reader(self, opens_thought: bool, bytes_of: Callable[[int], bytes]) -> Reader:
        """Return a reader of one answer.

        opens_thought: whether the prompt ends within a thought. bytes_of: returns a token's bytes.
        """
        calls, markers = self._calls, self._format.thought_markers
        # A form without a thought before it may begin with anything, even with a marker.
        thinks = self._thoughts and not (self._structured and self._thought(opens_thought) == "never")
        counter = ThoughtTokenCounter(bytes_of, markers, opens_thought) if thinks else None
        if self._harmony:
            tools = self._tools.schemas if self._harmony_calls else None
            messages = HarmonyParser(tools, parallel=self._tools.parallel, thoughts=self._thoughts)
            return Reader(AnswerParser(harmony=messages), counter)
        free = not self._tools.constrain and not self._structured
        parser = AnswerParser(
            ThoughtParser(opens_thought, markers) if thinks else None,
            None if calls is None else self._call_parser(calls),
            calls_begin=calls.syntax.begin if self._structured and calls is not None else None,
            # With a grammar, no answer ends within its thought.
            unclosed=UnclosedThought(calls, self._tools.schemas, self._tools.parallel)
            if thinks and free and calls is not None
            else None,
        )
        return Reader(parser, counter)

    def _call_parser(self, form: CallFormat) -> ToolCallParser:
        tools = self._tools
        # Grammars know only calls with their markers. Other calls would escape a strict schema.
        lenient = not tools.forced and not tools.strict and not self._structured
        return ToolCallParser(form, tools.schemas, tools.parallel, lenient=lenient, forced=tools.forced)

    def _grammar(self) -> CallGrammar | HarmonyGrammar | None:
        """Return the grammar of the callable tools; None if there are none. Arguments are free unless they must match
        a schema.
        """
        if self._calls is None and not self._harmony_calls:
            return None
        tools = [
            tool if self._tools.forced or tool.strict else msgspec.structs.replace(tool, parameters={"type": "object"})
            for tool in self._tools.tools
        ]
        if self._calls is None:
            return HarmonyGrammar(tools, self._tools.parallel, self._format.markers)
        return CallGrammar(tools, self._calls, self._tools.parallel, self._format.markers, self._format.thought_markers)

    def _thought(self, opens_thought: bool) -> Thought:
        """Return whether a thought may come before the answer; "never" if thoughts are not searched for."""
        if self._harmony:
            return "possible"  # these models think in any case
        if not self._thoughts:
            return "never"
        return "open" if opens_thought else "possible" if self._may_think else "never"
