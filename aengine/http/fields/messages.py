"""The fields of a chat: messages, tools, the choice of a tool, and options of the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from aengine.errors import InvalidRequestError
from aengine.http.engine_like import EngineLike
from aengine.http.fields.images import ImageUrl, MediaRules, Piece, content_of, image_of_url
from aengine.http.fields.unknown import RequestBody
from aengine.text.template.messages import TemplateOptions

_IMAGES = ("image_url", "input_image")


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message. Its type is `text`, `image_url` or `refusal`; other types are refused."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    refusal: str | None = None  # the assistant's refusal to answer


# `(?!\n)`: Python's `$` alone would allow a line break at the end.
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]

# Names in a history may have dots and colons. A name never begins with a slash, because some templates write
# `<{{ name }}>`, which would then be a closing tag.
WrittenName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-][a-zA-Z0-9_.:/-]{0,127}$(?!\n)")]


class WrittenFunction(msgspec.Struct, kw_only=True):
    name: WrittenName
    arguments: str | dict[str, Any] = ""  # JSON text as in OpenAI's API, or the object itself


class WrittenCall(msgspec.Struct, kw_only=True):
    """A tool call in an assistant's message of the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: WrittenFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    refusal: str | None = None  # replaces missing content
    tool_calls: list[WrittenCall] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # refused
    audio: dict[str, Any] | None = None  # refused

    def for_template(self, where: str, newest: bool, rules: MediaRules) -> dict[str, Any]:
        """Return the message for the chat template, with joined text parts.

        newest: whether it is the user's newest message.
        Raises `InvalidRequestError`.
        """
        for name, remedy in _REFUSED_IN_MESSAGES.items():
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"{where}.{name}: {remedy}", f"{where}.{name}")
        content: str | list[dict[str, Any]] | None = self.refusal
        if isinstance(self.content, list):
            content = content_of(self._pieces(self.content, where, newest, rules))
        elif self.content is not None:
            content = self.content
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = msgspec.to_builtins(self.tool_calls)
        return message

    def _pieces(self, parts: Sequence[ContentPart], where: str, newest: bool, rules: MediaRules) -> Iterator[Piece]:
        for index, part in enumerate(parts):
            path = f"{where}.content[{index}]"
            instead = rules.instead_of(part.type, self.role, path, newest=newest)
            if instead is not None:
                yield instead
            elif part.type in _IMAGES:
                url, field = part.image_url, f"{path}.image_url"
                yield image_of_url(url.url, f"{field}.url") if isinstance(url, ImageUrl) else image_of_url(url, field)
            elif part.type not in ("text", "refusal"):
                raise InvalidRequestError(
                    f"{path}.type: a message has parts of type text and image_url, not {part.type!r}", f"{path}.type"
                )
            else:
                text: str | None = getattr(part, part.type)
                if text is None:
                    path = f"{path}.{part.type}"
                    raise InvalidRequestError(f"{path}: a part of type {part.type!r} must have it", path)
                yield text


_REFUSED_IN_MESSAGES = {
    "function_call": "an older form of tool_calls; send tool_calls",
    "audio": "this model reads text only",
}


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it has no parameters
    strict: bool | None = None  # arguments follow the schema even if the call is not forced


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: str


class ChosenTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """`tool_choice` that names the function to call."""

    function: ChosenFunction


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice` that names the tools that may be called."""

    allowed_tools: AllowedTools


ToolChoice = ChosenTool | AllowedToolsChoice


def messages_for_template(messages: Sequence[ChatMessage], engine: EngineLike) -> list[dict[str, Any]]:
    """Return the messages for `encode_chat`. Raises `InvalidRequestError`, naming a part that cannot be read."""
    rules = MediaRules(engine.no_images, engine.images_in_results)
    newest = len(messages) - 1
    while newest >= 0 and messages[newest].role != "user":
        newest -= 1
    rendered = []
    for index, message in enumerate(messages):
        rendered.append(message.for_template(f"messages[{index}]", index == newest, rules))
    return rendered


def tools_for_template(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools for the chat template; None without tools."""
    if not tools:
        return None
    # `strict` is left out for the template; the grammar enforces it.
    return [{"type": tool.type, "function": msgspec.to_builtins(replace(tool.function, strict=None))} for tool in tools]


Tools = Annotated[list[Tool], Meta(max_length=128)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateRequest(Protocol):
    """A request with options of the chat template."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> ReasoningEffort | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def template_options(body: TemplateRequest) -> TemplateOptions:
    """Return the request's options of the chat template, as arguments of `encode_chat`.

    `chat_template_kwargs` override the variables that follow from `reasoning_effort`. Raises `InvalidRequestError` for
    contradicting options.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other: send one of them",
            "add_generation_prompt",
        )
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    if effort is not None:
        thinks = effort not in ("none", "minimal")
        kwargs = {"enable_thinking": thinks, "reasoning_effort": effort, **(kwargs or {})}
    return TemplateOptions(
        template_kwargs=kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
    )


_OF_CHATS = ("tools", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message")


def refuse_chat_fields(body: RequestBody) -> None:
    """Raise `InvalidRequestError` if a request with a prompt has fields that only a chat template reads."""
    for name in _OF_CHATS:
        if getattr(body, name) not in (None, False, [], {}):
            raise InvalidRequestError(f"{name} goes with messages; a prompt passes no chat template", name)
