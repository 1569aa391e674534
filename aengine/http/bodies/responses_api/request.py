"""The body of a request to `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from aengine.errors import InvalidRequestError
from aengine.http.bodies.requests import Count, Drawing, Int, Logprobs, ReasoningEffort
from aengine.http.bodies.responses_api.items import InputItem
from aengine.http.bodies.responses_api.tools import MAX_TOOLS, ResponsesTool, ResponsesToolChoice
from aengine.requests.structured import Structured

Summary = Literal["auto", "concise", "detailed"]
Label = Annotated[str, Meta(max_length=512)]  # what the answer repeats
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# The others speak of what only OpenAI's own tools bring.
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
    """Whether the model thinks, and where in the answer its thought stands: as content, or as its own summary."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None  # all three are the whole thought
    generate_summary: Summary | None = None  # an older name
    context: Literal["auto", "current_turn", "all_turns"] | None = None  # only auto: the chat template decides
    mode: str | None = None  # only standard


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the answer. A JSON schema is always followed; with `strict` it is as in chats."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")] | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def structured(self) -> Structured | None:
        """The form for the engine. Raises `InvalidRequestError`, naming the field that is missing."""
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
    verbosity: Literal["low", "medium", "high"] | None = None  # taken: the length is the model's own choice


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None  # taken; nothing is added to events


class ResponsesRequest(Drawing, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    max_tool_calls: Int | None = None  # of OpenAI's own tools, which there are none of
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    top_logprobs: Logprobs | None = None  # with include
    truncation: Literal["auto", "disabled"] | None = None  # taken; a prompt beyond the context is refused all the same
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Label | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    add_generation_prompt: ClassVar[None] = None  # an answer always begins, and goes on with none
    continue_final_message: ClassVar[None] = None

    @property
    def reasoning_effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def structured(self) -> Structured | None:
        """The form of the answer. Raises `InvalidRequestError`, naming the field that is missing."""
        return None if self.text is None or self.text.format is None else self.text.format.structured()

    def refuse_unsupported(self) -> None:
        """Raise `InvalidRequestError`, naming the field, for values that ask for what is not done here."""
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
