"""The fields for structured output: `response_format`, `structured_outputs` and `guided_*`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aengine.errors import InvalidRequestError
from aengine.requests.structured import KINDS, Structured, Thought


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON schema, which is always followed. Its name and description have no effect.

    With `strict`, a schema with an unknown `format` or with `uniqueItems` is refused; otherwise these are ignored.
    """

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's `response_format`. For both JSON types the schema may also be in the fields of other servers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's field
    value: dict[str, Any] | None = None  # TGI's field

    def structured(self) -> Structured | None:
        name = "response_format"
        if self.type == "text":
            return None
        named = self.json_schema or NamedSchema()
        schemas = [schema for schema in (named.schema, self.schema, self.value) if schema is not None]
        if any(schema != schemas[0] for schema in schemas):
            raise InvalidRequestError("response_format has two schemas that differ", name)
        if schemas:
            return Structured(json=schemas[0], strict=bool(named.strict), origin=name)
        if self.type == "json_schema" or self.json_schema is not None:
            raise InvalidRequestError(f"response_format of type {self.type} needs json_schema.schema", name)
        return Structured(json_object=True, origin=name)


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`, with the other fields of `Structured`."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    thought: Thought | None = None  # whether a thought may precede the output; None: never; chats override it
    calls: str | None = None  # grammar rules of calls that may replace the output
    strict: bool | None = None  # as in `NamedSchema`

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
            strict=bool(self.strict),
            origin=name,
        )


def single_form(fields: dict[str, Any]) -> Structured | None:
    """Return the form that the fields ask for. fields: by name, such as `response_format` or `guided_json`.

    Several fields may ask for the same form, as clients for several versions of vLLM do. Raises `InvalidRequestError`
    if two forms differ.
    """
    forms: list[Structured] = []
    for name, value in fields.items():
        if isinstance(value, ResponseFormat | StructuredOutputs):
            if (structured := value.structured()) is not None:
                forms.append(structured)
        else:
            kind = name.removeprefix("guided_")
            form: dict[str, Any] = {kind: tuple(value) if kind == "choice" else value}
            forms.append(Structured(origin=name, **form))
    for other in forms[1:]:
        if msgspec.structs.replace(other, origin=forms[0].origin) != forms[0]:
            names = " and ".join(structured.param for structured in forms)
            raise InvalidRequestError(f"an output can follow one form only, got {names}", other.param)
    return forms[0] if forms else None
