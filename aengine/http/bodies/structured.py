"""The fields of a request that say what its output must match: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aengine.errors import InvalidRequestError
from aengine.structured import KINDS, Structured, Thought


class NamedSchema(msgspec.Struct, kw_only=True):
    """`name`, `description` and `strict` change nothing: every schema is followed to the letter."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def structured(self) -> Structured | None:
        name = "response_format"
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Structured(json_object=True, origin=name)
        if self.json_schema is None or self.json_schema.schema is None:
            raise InvalidRequestError("response_format of type json_schema needs json_schema.schema", name)
        return Structured(json=self.json_schema.schema, origin=name)


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`, and what else a `Structured` may say."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    thought: Thought | None = None  # may the model think before it? None: never; chats see to it themselves
    calls: str | None = None  # rules for calls that may stand in its place

    def structured(self) -> Structured:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        name = f"structured_outputs.{given[0]}" if len(given) == 1 else "structured_outputs"
        return Structured(
            json=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
            thought=self.thought or "never",
            calls=self.calls,
            origin=name,
        )


def asked_structured(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None, guided: dict[str, Any]
) -> Structured | None:
    """The one thing asked for, by whichever field. `guided` maps fields such as `guided_json` to their values.

    The same one may be asked for by several fields: clients do so that serve several versions of vLLM. Raises
    `InvalidRequestError` for two that differ.
    """
    asked: list[Structured] = []
    if response_format is not None and (structured := response_format.structured()) is not None:
        asked.append(structured)
    if structured_outputs is not None:
        asked.append(structured_outputs.structured())
    for name, value in guided.items():
        if value is not None:
            kind = name.removeprefix("guided_")
            fields: dict[str, Any] = {kind: tuple(value) if kind == "choice" else value}
            asked.append(Structured(origin=name, **fields))
    for other in asked[1:]:
        if msgspec.structs.replace(other, origin=asked[0].origin) != asked[0]:
            names = " and ".join(structured.param for structured in asked)
            raise InvalidRequestError(f"an output can follow one form only, got {names}", other.param)
    return asked[0] if asked else None
