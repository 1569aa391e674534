"""Formats whose calls are JSON objects: Hermes, Qwen, Phi-4-mini, Granite 3, Command R7B and A, Nemotron-H,
Llama 3.
"""

from __future__ import annotations

from aengine.text.answer.formats.base import CallableTool, CallFormat, CallReader, CallSyntax, Tools
from aengine.text.answer.formats.json_call import JsonCallReader, json_call_rules
from aengine.text.answer.lark import Tokens


class JsonObjects(CallFormat):
    """The base of formats with a list of JSON objects, or a single one, after a marker."""

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return JsonCallReader(tools, self.syntax.markers, opening="[" if first else "", opened=False)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "arguments")


class Hermes(JsonObjects):
    """A JSON object between `<tool_call>` and `</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3."""

    syntax = CallSyntax(
        begin="<tool_call>",
        opening=r'"\n"',
        closing="\n</tool_call>",
        end="</tool_call>",
        further="{",  # a list is read as well
        noise=" \t\r\n,}]",  # an extra brace is ignored
        between="\n",
    )

    def detect(self, template: str) -> bool:
        return "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>"))


_BEGIN, _END = "<|tool_call|>", "<|/tool_call|>"


class JsonList(JsonObjects):
    """A list of JSON objects after `<|tool_call|>`: Phi-4-mini, which ends it with `<|/tool_call|>`, and Granite 3.

    Both also begin lists without that token: `functools[{...}]`, and `<tool_call>[{...}]</tool_call>` (Granite 3.1). A
    single object without a list is read as well. ended: a marker follows the list.
    """

    def __init__(self, *, ended: bool) -> None:
        self.syntax = CallSyntax(
            begin=_BEGIN,
            begins={"functools[": ""} if ended else {"<tool_call>": "</tool_call>"},
            opening='"["',
            separator=", ",
            closing=f"]{_END}" if ended else "]",
            end=_END if ended else "]",
            further="{",
            noise=" \t\r\n,}]" if ended else " \t\r\n,}",
        )
        self._ended = ended

    def detect(self, template: str) -> bool:
        if self._ended and "<|tool|>" in template and "<|/tool|>" in template:
            return True
        return _BEGIN in template and (_END in template) == self._ended


class NemotronList(JsonObjects):
    """A list of JSON objects between `<TOOLCALL>` and `</TOOLCALL>`: Nemotron-H and Nemotron Nano 2."""

    syntax = CallSyntax(
        begin="<TOOLCALL>",
        opening='"["',
        separator=", ",
        closing="]</TOOLCALL>",
        end="</TOOLCALL>",
        further="{",
        noise=" \t\r\n,}]",
    )

    def detect(self, template: str) -> bool:
        return self.syntax.begin in template


class CohereActions(JsonObjects):
    """A list of JSON objects with an id and `tool_name` between two markers: Command R7B and A."""

    syntax = CallSyntax(
        begin="<|START_ACTION|>",
        opening='"["',
        separator=", ",
        closing="]<|END_ACTION|>",
        end="<|END_ACTION|>",
        further="{",
        noise=" \t\r\n,}]",
    )

    def detect(self, template: str) -> bool:
        return self.syntax.begin in template

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "parameters", name='"tool_call_id": "0", "tool_name"')


class Llama3(CallFormat):
    """A JSON object that is the whole answer, or one after `<|python_tag|>`: Llama 3.1 to 3.3."""

    syntax = CallSyntax(
        begin="<|python_tag|>",
        bare="{",
        separator="; ",
        further="{",
        noise=" \t\r\n};",  # an extra brace is ignored
    )

    def detect(self, template: str) -> bool:
        return "<|python_tag|>" in template or ('{"name": ' in template and '"parameters": ' in template)

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return JsonCallReader(tools, self.syntax.markers)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "parameters")
