"""The grammar of an answer that must call tools, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

from aengine.text.reasoning import THOUGHT_BEGIN, THOUGHT_END
from aengine.text.tool_syntax import CallSyntax

Thought = Literal["never", "possible", "open"]

# JSON as chat templates write it and models learn it. Without free white space no answer can end in endless blanks.
# What the compiler does not know of a schema is not enforced: the arguments are the client's to check in any case.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    schemas: Mapping[str, Mapping[str, Any] | None],
    syntax: CallSyntax,
    *,
    parallel: bool = True,
    thought: Thought = "never",
    special_tokens: Collection[str] = (),
) -> str:
    """A grammar of at least one call, with `parallel` of any number.

    `schemas` are the arguments' JSON schemas by the tools' names, None for a tool without parameters. A thought may
    come first where it is `possible`; `open` means that the prompt has begun it. Those markers that the tokenizer
    holds as special tokens, which are no text, must be named.
    """

    def marker(text: str) -> str:
        return text if text in special_tokens else json.dumps(text)

    calls = [f"call_{index}" for index in range(len(schemas))]
    more = f" ({json.dumps(syntax.separator)} call)*" if parallel else ""
    rules = [f"start: {_thought(thought)}call{more}", f"call: {' | '.join(calls)}"]
    if thought != "never":
        # Special tokens are no part of a text; written out, the marker is where the text ends.
        begin = f"{marker(THOUGHT_BEGIN)} " if thought == "possible" else ""
        if THOUGHT_END in special_tokens:
            rules.append(f"thought: {begin}/(.|\\n)*/ {THOUGHT_END} /\\n{{0,2}}/")
        else:
            rules.append(f"thought: {begin}thinking /\\n{{0,2}}/")
            rules.append(f"thinking[suffix={json.dumps(THOUGHT_END)}]: /(.|\\n)*/")
    before = "" if syntax.bare else f'{marker(syntax.begin)} "\\n" '
    after = f' "\\n" {marker(syntax.end)}' if syntax.end else ""
    for rule, (name, schema) in zip(calls, schemas.items(), strict=True):
        head = f'{{"name": {json.dumps(name)}, "{syntax.arguments}": '
        rules.append(f'{rule}: {before}{json.dumps(head)} {rule}_arguments "}}"{after}')
        rules.append(f"{rule}_arguments: %json {json.dumps(_arguments(schema))}")
    return "\n".join(rules)


def _thought(thought: Thought) -> str:
    return {"never": "", "possible": "thought? ", "open": "thought "}[thought]


def _arguments(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(_NO_PARAMETERS if schema is None else schema), "type": "object", "x-guidance": _JSON_OPTIONS}
