"""The tools of a request to `/v1/responses`, and the choice of one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aengine.http.bodies.chat import FunctionName

MAX_TOOLS = 128  # of a request, those in namespaces included


class CustomFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of a custom tool's input. Grammars are regexes; Lark's are refused."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A `function`, whose arguments are JSON, or a `custom` tool, whose input is text, or a `namespace` of such tools.

    All other types are refused, with a sentence: OpenAI's servers run those themselves.
    """

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it has no parameters
    strict: bool | None = None  # a call that the model makes by itself has arguments of this schema as well
    format: CustomFormat | None = None  # None: text
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None  # of a namespace, which holds none


class NamedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ResponsesChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`tool_choice` that names a tool, or with the type `allowed_tools` those that may be called."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(min_length=1)] | None = None


ResponsesToolChoice = Literal["none", "auto", "required"] | ResponsesChoice
