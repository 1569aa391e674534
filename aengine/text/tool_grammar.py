"""The grammar of an answer that calls tools, in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from aengine.structured import Thought
from aengine.text.reasoning import THOUGHT_BEGIN
from aengine.text.thought_grammar import marker, thought_rules
from aengine.text.tool_syntax import CallSyntax

# JSON as chat templates write it and models learn it. Without free white space no answer can end in endless blanks.
# What the compiler does not know of a schema is not enforced: the arguments are the client's to check in any case.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    schemas: Mapping[str, Mapping[str, Any] | None],
    syntax: CallSyntax,
    *,
    forced: bool = True,
    parallel: bool = True,
    thought: Thought = "never",
    special_tokens: Collection[str] = (),
) -> str:
    """A grammar of at least one call, with `parallel` of any number.

    Not `forced`: of any text with calls in it, or none. Where the syntax knows calls without a marker: of calls, or of
    a text that does not begin as they do.

    `schemas` are the arguments' JSON schemas by the tools' names, None for a tool without parameters. A thought may
    come first where it is `possible`; `open` means that the prompt has begun it. Those markers that the tokenizer
    holds as special tokens, which are no text, must be named.
    """
    calls = [f"call_{index}" for index in range(len(schemas))]
    more = f" ({json.dumps(syntax.separator)} call)*" if parallel else ""
    before_all, thinking = thought_rules(thought, special_tokens)
    begin = marker(syntax.begin, special_tokens)
    if forced:
        rules = [f"start: {before_all}call{more}"]
    elif syntax.bare:
        taken = "{" + ("<" if thought == "possible" and THOUGHT_BEGIN not in special_tokens else "")
        rules = [f"start: {before_all}({begin}? call{more} | text?)", f"text: /[^{taken}\\s](.|\\n)*/"]
    else:
        # `till_call` takes the marker along.
        rules = [f"start: {before_all}(till_call call){'*' if parallel else '?'} /(.|\\n)*/"]
        special = syntax.begin in special_tokens
        rules.append(f"till_call: /(.|\\n)*/ {begin}" if special else f"till_call[suffix={begin}]: /(.|\\n)*/")
    rules += [f"call: {' | '.join(calls)}", *thinking]
    before = "" if syntax.bare else f'{begin} "\\n" ' if forced else '"\\n" '
    after = f' "\\n" {marker(syntax.end, special_tokens)}' if syntax.end else ""
    for rule, (name, schema) in zip(calls, schemas.items(), strict=True):
        head = f'{{"name": {json.dumps(name)}, "{syntax.arguments}": '
        rules.append(f'{rule}: {before}{json.dumps(head)} {rule}_arguments "}}"{after}')
        rules.append(f"{rule}_arguments: %json {json.dumps(_arguments(schema))}")
    return "\n".join(rules)


def _arguments(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(_NO_PARAMETERS if schema is None else schema), "type": "object", "x-guidance": _JSON_OPTIONS}
