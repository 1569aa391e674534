"""The body of a request to `/v1/responses`: items of a conversation, tools, and the choice of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aengine.errors import InvalidRequestError
from aengine.http.fields.messages import FunctionName, ReasoningEffort, WrittenName
from aengine.http.fields.sampling import Count, Int, Logprobs, SamplingRequest
from aengine.http.fields.unknown import REFUSED_WITH_CHATS, Unsupported
from aengine.requests.structured import Structured

MAX_TOOLS = 128  # in a request, including those in namespaces
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content. Types other than texts, `input_image` and `refusal` are refused."""

    type: str
    text: str | None = None
    image_url: str | None = None  # a data URL in base64
    file_id: str | None = None  # refused
    detail: str | None = None  # accepted without effect
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a request. Its fields depend on its type; without a type it is a message.

    Items of an answer may be sent back unchanged. Fields without effect (`status`, `phase`, ...) are ignored.
    """

    type: str | None = None
    id: str | None = None
    # a message
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None  # of a message or a thought
    # a tool call, and its output
    call_id: str | None = None
    name: WrittenName | None = None
    namespace: WrittenName | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    # a thought
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class CustomFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of a custom tool's input. A grammar is a regex; Lark grammars are refused."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A `function` with JSON arguments, a `custom` tool with a text as input, or a `namespace` of such tools.

    Other types are refused, because OpenAI's servers run these tools themselves.
    """

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it has no parameters
    strict: bool | None = None  # arguments follow the schema even if the call is not forced
    format: CustomFormat | None = None  # None: text
    # The tools of a namespace. Namespaces are not nested.
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None


class NamedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    namespace: str | None = None


class ResponsesChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`tool_choice` that names a tool, or with type `allowed_tools` the tools that may be called."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(min_length=1)] | None = None


ResponsesToolChoice = Literal["none", "auto", "required"] | ResponsesChoice

_REFUSED: Mapping[str, Unsupported] = {
    **REFUSED_WITH_CHATS,
    # OpenAI's fields
    "background": Unsupported("not supported; send stream instead", (False,)),
    "background_options": Unsupported("not supported; send stream instead", ({},)),
    "conversation": Unsupported("conversations are not kept here; send their items as input"),
    "prompt": Unsupported("prompt templates are not kept here; send instructions and input"),
    "context_management": Unsupported("not supported; leave items out of input", ([],)),
    "image": Unsupported("only text is read and written here", ({},)),
    "access_programs": Unsupported("not supported", ({},)),
    # fields of the other endpoints
    "messages": Unsupported("it is called input here"),
    "max_tokens": Unsupported("it is called max_output_tokens here"),
    "max_completion_tokens": Unsupported("it is called max_output_tokens here"),
    "response_format": Unsupported("send text with format in it", ({"type": "text"},)),
    "reasoning_effort": Unsupported("send reasoning with effort in it"),
    "logprobs": Unsupported("send include with message.output_text.logprobs, and top_logprobs", (False,)),
    "n": Unsupported("a response has one answer; send the request several times", (1,)),
}

Summary = Literal["auto", "concise", "detailed"]
Label = Annotated[str, Meta(max_length=512)]  # repeated in the answer
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)]
# The other values concern OpenAI's own tools.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
]


class Reasoning(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Whether the model thinks, and whether the answer has the thought as content or as a summary."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None  # every value shows the whole thought
    generate_summary: Summary | None = None  # an older name
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # auto only: the chat template decides
    mode: str | None = None  # standard only


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the answer. A JSON schema is always followed; `strict` means the same as in chats."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")] | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def structured(self) -> Structured | None:
        """Return the form for the engine. Raises `InvalidRequestError`, naming a missing field."""
        if self.type == "text":
            return None
        if self.type == "json_object" and self.schema is None:
            return Structured(json_object=True, origin="text.format")
        for name in ("name", "schema") if self.type == "json_schema" else ():
            if getattr(self, name) is None:
                raise InvalidRequestError(
                    f"text.format.{name}: a format of type json_schema must have it", f"text.format.{name}"
                )
        return Structured(json=self.schema, strict=bool(self.strict), origin="text.format.schema")


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # accepted without effect


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None  # accepted; events are never padded


class ResponsesRequest(SamplingRequest, kw_only=True):
    """`POST /v1/responses`."""

    refused: ClassVar[Mapping[str, Unsupported]] = _REFUSED

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    max_tool_calls: Int | None = None  # accepted: it concerns OpenAI's own tools
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    top_logprobs: Logprobs | None = None  # requires include
    # Accepted without effect: a prompt longer than the context is always refused.
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Label | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    add_generation_prompt: ClassVar[None] = None  # an answer never continues a message
    continue_final_message: ClassVar[None] = None

    @property
    def reasoning_effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def structured(self) -> Structured | None:
        """Return the form for the engine. Raises `InvalidRequestError`, naming a missing field."""
        return None if self.text is None or self.text.format is None else self.text.format.structured()

    def refuse_unsupported(self) -> None:
        """Raise `InvalidRequestError`, naming the field, for unsupported values."""
        reasoning = self.reasoning or Reasoning()
        for field, value, taken, remedy in (
            ("reasoning.context", reasoning.context, "auto", "the chat template decides which thoughts it shows"),
            ("reasoning.mode", reasoning.mode, "standard", "see reasoning.effort"),
        ):
            if value not in (None, taken):
                raise InvalidRequestError(f"{field}: {value[:100]!r} is not supported; {remedy}", field)
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
