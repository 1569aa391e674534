"""Renders chat templates: messages to text, as transformers does."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple, Unpack

from jinja2 import Template, meta
from jinja2.exceptions import SecurityError

from aengine.errors import CheckpointError, InvalidRequestError
from aengine.text.template.budget import Budget, LimitError
from aengine.text.template.control_tokens import ControlTokens, Marker
from aengine.text.template.layouts import (
    harmony_kwargs,
    harmony_messages,
    with_lfm2_calls,
    with_observations,
    with_single_calls,
    with_tool_responses,
    with_tools,
    with_written_calls,
)
from aengine.text.template.messages import (
    CALLS_LAYOUTS,
    RESERVED_NAMES,
    CallsLayout,
    TemplateOptions,
    plain_data,
    plain_message,
)
from aengine.text.template.sandbox import (
    RaisedByTemplate,
    Sandbox,
    TemplateDict,
    TemplateNamespace,
    raise_exception,
    strftime_now,
)
from aengine.text.template.tools import PROBE_TOOLS, TOOL_PROBES, ToolsLayout, laid_out

RENDER_SECONDS = 5.0
_LARGEST_TEXT = 4 * 2**20  # characters, plus eight times the size of the messages
_LARGEST_CHAT = 4 * 2**20  # as `Budget.measure` counts
_MAX_TEMPLATE = 2**18
_MAX_MESSAGE = 2000
_LFM2_CALLS = ("<|tool_call_start|>", "<|tool_call_end|>")

_CALLS = [{"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": '{"a": 1}'}}]
_CUT_CALLS = [{**_CALLS[0], "function": {"name": "probe", "arguments": "{"}}]
_CALL: list[dict[str, object]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": _CALLS},
    {"role": "tool", "tool_call_id": "call00000", "content": "result"},
]


class ChatTemplates:
    """The chat templates of a checkpoint, compiled.

    where: names the checkpoint in errors. harmony: the templates are gpt-oss's, which need a special layout of chats.
    """

    def __init__(
        self,
        where: str,
        sources: Mapping[str, str],
        variables: Mapping[str, str],
        control: ControlTokens,
        *,
        harmony: bool = False,
    ) -> None:
        self._where = where
        self._variables = dict(variables)
        self._control = control
        self._sandbox = Sandbox()
        self._sandbox.add_filter("tojson", self._to_json)
        self._sandbox.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, namespace=TemplateNamespace, dict=TemplateDict()
        )
        self._supports_developer = any("developer" in source for source in sources.values())
        self._harmony = harmony
        compiled = {name: self._compile(name, source) for name, source in sources.items()}
        self._templates = {
            name: Template.from_code(self._sandbox, one.code, self._sandbox.make_globals(None))
            for name, one in compiled.items()
        }
        self._reads_tools = any("tools" in one.reads for one in compiled.values())
        self._tools_in_messages = self._tools_listed = False
        self._tools_layout = ToolsLayout()
        self._thinking = any("thinking" in one.reads for one in compiled.values())
        self._reserved = RESERVED_NAMES | variables.keys() | self._sandbox.globals.keys()
        self._results_with_calls = self._calls_in_metadata = self._single_calls = False
        self._around_calls: dict[str, str] = {}  # the special tokens around calls that are written into content
        self._calls = self._calls_layout(sources.values())
        if self._takes(_CALLS):
            self._calls = self._calls._replace(objects_only=not self._takes(_CUT_CALLS))
            self._single_calls = not harmony and not self._takes(2 * _CALLS)
        self._results_with_calls = self._expects_results_with_calls(sources.values())
        self._knows_calls = any("tool_calls" in source for source in sources.values())
        self._calls_in_metadata = not self._knows_calls and self._expects_metadata(sources.values())
        if self._reads_tools:
            self._find_tools_layout()
        self._reads_tools = self._reads_tools and self._writes_tools()
        self._tools_in_messages = self._looks_for_tools_in_messages(sources.values())
        self.takes_tools = self._reads_tools or self._tools_in_messages
        around = _LFM2_CALLS if self._reads_tools and not self._knows_calls and not self._calls_in_metadata else ()
        self._around_calls = control.placeholders(around) if {*around} <= {*control.texts} else {}

    def __bool__(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> tuple[str, bool]:
        """Return the text of a chat, and whether special tokens in messages are written as stand-ins.

        With `continue_final_message` the text ends where the last message's content does, so that the model continues
        it. May take `RENDER_SECONDS`: call it in a thread. Raises `InvalidRequestError` if the messages do not suit the
        template, and `CheckpointError` if the template does something forbidden.
        """
        template = self._choose(tools)
        kwargs = self._checked_kwargs(options.get("template_kwargs") or {})
        continues = options.get("continue_final_message", False)
        if self._thinking and "enable_thinking" in kwargs:
            kwargs.setdefault("thinking", kwargs["enable_thinking"])  # some templates use this name
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        plain = [plain_message(message, self._supports_developer, self._calls) for message in messages]
        if self._single_calls:
            plain = with_single_calls(plain)
        if self._results_with_calls:
            plain = with_tool_responses(plain)
        if self._calls_in_metadata:
            plain = with_observations(plain)
        if self._around_calls:
            plain = with_lfm2_calls(plain, *self._around_calls.values())
        offered = None if tools is None else plain_data(tools, "tools")
        if self._tools_in_messages:
            plain = plain if self._knows_calls else with_written_calls(plain)
            plain = (
                with_tools(plain, offered, listed=self._tools_listed)
                if isinstance(offered, list) and offered
                else plain
            )
        elif offered and not self._reads_tools:
            raise InvalidRequestError(
                "tools: the model would not see them, because its chat template has no place for tools; describe them "
                "in a message, or serve the model with another template",
                "tools",
            )
        if isinstance(offered, list):
            offered = laid_out(offered, self._tools_layout)
        if self._harmony:
            plain, kwargs = harmony_messages(plain), harmony_kwargs(kwargs)
        end = _End(plain, messages[-1].get("content")) if continues else None
        data = {
            "messages": plain,
            "tools": offered,
            "add_generation_prompt": options.get("add_generation_prompt", True) and not continues,
            "documents": None,
            **kwargs,
        }
        size = Budget(RENDER_SECONDS, 0).measure(data)
        if size > _LARGEST_CHAT:
            raise InvalidRequestError(
                f"the chat is too large: {size} characters with its structure, at most {_LARGEST_CHAT} are rendered",
                "messages",
            )
        text, quoted = self._render(template, data)
        for token, placeholder in self._around_calls.items():
            text = text.replace(placeholder, token)
        return (text if end is None else end.cut(text)), quoted

    def _render(self, template: Template, data: dict[str, object]) -> tuple[str, bool]:
        marker = self._control.marker_for(data)
        if marker is None:
            return self._run(template, data, None), False
        marked = {name: marker.mark_all(value) for name, value in data.items()}
        text, quoted = marker.settle(self._run(template, marked, marker))
        if quoted:
            return text, True
        # Marks make texts longer, and a template may look at lengths. Use the unmarked rendering if it has the same
        # control tokens.
        plain = self._run(template, data, None)
        return (plain if self._control.found_in(plain) == self._control.found_in(text) else text), False

    def _calls_layout(self, sources: Iterable[str]) -> CallsLayout:
        """Return how the template takes a message with calls: the first layout that it does not refuse."""
        writes_calls = any("arguments" in source for source in sources)
        for layout in CALLS_LAYOUTS if writes_calls else (CallsLayout(), CallsLayout(no_content="empty")):
            self._calls = layout
            with suppress(InvalidRequestError, CheckpointError):
                if "probe" in self.render(_CALL)[0] or not writes_calls:
                    return layout
        return CallsLayout()

    def _takes(self, calls: object) -> bool:
        """Return whether the template takes a message with these calls."""
        with suppress(InvalidRequestError, CheckpointError):
            self.render([_CALL[0], {**_CALL[1], "tool_calls": calls}])
            return True
        return False

    def _expects_results_with_calls(self, sources: Iterable[str]) -> bool:
        """Return whether the template expects results in the message with the calls.

        Such a template writes the results in other messages without the tool's name.
        """
        if not any("tool_responses" in source for source in sources):
            return False
        with suppress(InvalidRequestError, CheckpointError):
            return self.render(_CALL)[0].count("probe") == 1
        return True

    def _expects_metadata(self, sources: Iterable[str]) -> bool:
        """Return whether the template writes a call if its name is the metadata of a message."""
        if not any("metadata" in source for source in sources):
            return False
        self._calls_in_metadata = True
        with suppress(InvalidRequestError, CheckpointError):
            return "probe" in self.render(_CALL)[0]
        return False

    def _writes_tools(self) -> bool:
        """Return whether a template that reads `tools` also writes them. If it refuses the probes, it may do so."""
        written = False
        system: dict[str, object] = {"role": "system", "content": "hello"}
        for chat in (_CALL[:1], [system, *_CALL[:1]]):
            with suppress(InvalidRequestError, CheckpointError):
                if "probe" in self.render(chat, PROBE_TOOLS)[0]:
                    return True
                written = True
        return not written

    def _find_tools_layout(self) -> None:
        """Find the layout with which the template takes tools that leave things out."""
        for tools, changes in TOOL_PROBES:
            layout = self._tools_layout
            for change in ({}, *changes):
                self._tools_layout = layout._replace(**change)
                with suppress(InvalidRequestError, CheckpointError):
                    self.render(_CALL[:1], tools)
                    break
            else:
                self._tools_layout = layout

    def _looks_for_tools_in_messages(self, sources: Iterable[str]) -> bool:
        """Return whether the template takes tools with the system message, and in no other way."""
        if self._reads_tools or not any("tools" in source for source in sources):
            return False
        self._tools_in_messages = True
        for self._tools_listed in (False, True):
            with suppress(InvalidRequestError, CheckpointError):
                if "probe" in self.render(_CALL[:1], PROBE_TOOLS)[0]:
                    return True
        return False

    def writes_images_of_results(self, marker: str) -> bool:
        """Whether the template writes this marker for an image in the result of a tool."""
        result = {**_CALL[2], "content": [{"type": "image"}]}
        with suppress(InvalidRequestError, CheckpointError):
            return self.render([*_CALL[:2], result])[0].count(marker) == 1
        return False

    def _choose(self, tools: object) -> Template:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequestError("the model has no chat template: send a prompt instead of messages", "messages")
        return template

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, object]:
        reserved = sorted(name for name in kwargs if name in self._reserved)
        if reserved:
            raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")
        return {str(name): plain_data(value, "chat_template_kwargs") for name, value in kwargs.items()}

    def _run(self, template: Template, data: dict[str, object], marker: Marker | None) -> str:
        size = Budget(RENDER_SECONDS, 0).measure(data)
        budget = Budget(RENDER_SECONDS, _LARGEST_TEXT + 8 * size)
        try:
            with self._sandbox.rendering(budget, marker):
                return "".join(template.generate({**self._variables, **data}))
        except SecurityError as error:
            raise CheckpointError(
                f"{self._where}: its chat template does something forbidden: {error} Send a prompt instead of messages"
            ) from error
        except Exception as error:  # an expression may raise anything: undefined fields, wrong types
            message = _refusal(error) if marker is None else marker.unmark(_refusal(error))
            raise InvalidRequestError(message[:_MAX_MESSAGE], "messages") from error

    def _compile(self, name: str, source: str) -> _CompiledTemplate:
        if len(source) > _MAX_TEMPLATE:
            raise CheckpointError(f"{self._where}: chat template {name!r} has more than {_MAX_TEMPLATE} characters")
        try:
            return _compiled(source)
        except Exception as error:  # compiling nested expressions raises other errors than jinja2's
            raise CheckpointError(
                f"{self._where}: chat template {name!r} cannot be used: {type(error).__name__}: {error}"[:_MAX_MESSAGE]
            ) from error

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Encode JSON without the HTML escapes of jinja2's own filter."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None:
            text = encoder.encode(value)
        else:  # in pieces, because indentation can multiply the size
            pieces = []
            for piece in encoder.iterencode(value):
                self._sandbox.budget.spend(len(piece))
                pieces.append(piece)
            text = "".join(pieces)
        marker = self._sandbox.marker
        if marker is not None and ensure_ascii:
            text = text.replace(json.dumps(marker.mark)[1:-1], marker.mark)
        return text


class _CompiledTemplate(NamedTuple):
    """A template as bytecode. reads: the variables that it does not set itself."""

    code: CodeType
    reads: frozenset[str]


@functools.lru_cache(16)
def _compiled(source: str) -> _CompiledTemplate:
    """Compile a template once per process: compiling took half of the time to load a small model.

    The code keeps nothing of its environment. The environment that runs it looks up filters, tests
    and globals by name. Only the arguments of filters are decided here. So the stub for `tojson` has the signature of
    `ChatTemplates._to_json`.
    """
    sandbox = Sandbox()
    sandbox.add_filter("tojson", json.dumps)
    tree = sandbox.parse(source)
    reads = frozenset(meta.find_undeclared_variables(tree))
    return _CompiledTemplate(sandbox.compile(tree), reads)


class _End:
    """A tag after the last message's content, which marks the end of that content in the rendering.

    transformers does the same, so that the texts are equal. The constructor puts the tag into `messages`.
    """

    def __init__(self, messages: list[dict[str, object]], said: object) -> None:
        """said: the last message's content as the client sent it."""
        last = messages[-1]
        content = last.get("content")
        if said is None or not isinstance(content, str) or "tool_calls" in last:
            raise InvalidRequestError(
                "continue_final_message: the last message must end with text, and call no tools",
                "continue_final_message",
            )
        self._tag = f"{secrets.token_hex(16)} "  # its blank shows whether the template trims
        self._blanks = content[len(content.rstrip()) :]
        messages[-1] = {**last, "content": content + self._tag}

    def cut(self, text: str) -> str:
        """Return the rendering up to the tag. Raises `InvalidRequestError` if the template has left it out."""
        before, found, _ = text.rpartition(self._tag.rstrip())
        if not found:
            raise InvalidRequestError(
                "continue_final_message: the chat template leaves out the last message or its end",
                "continue_final_message",
            )
        return before if self._tag in text else before.removesuffix(self._blanks)


def _refusal(error: Exception) -> str:
    """Return the client's error for a failed rendering."""
    if isinstance(error, RaisedByTemplate):
        return str(error)
    if isinstance(error, (LimitError, RecursionError, MemoryError)):
        problem = {RecursionError: "it nests too deeply", MemoryError: "it needs too much memory"}.get(
            type(error), error
        )
        return f"messages: the chat template cannot be rendered: {problem}"
    return f"messages: the chat template cannot render them: {type(error).__name__}: {error}"
