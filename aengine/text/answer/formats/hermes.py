"""A JSON object between `<tool_call>` and `</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3."""

from __future__ import annotations

from aengine.text.answer.formats.base import CallableTool, CallReader, CallSyntax, Tools, call_id
from aengine.text.answer.formats.json_call import JsonCallReader, json_call_rules
from aengine.text.answer.lark import Tokens


class Hermes:
    syntax = CallSyntax(
        begin="<tool_call>",
        opening=r'"\n"',
        closing="\n</tool_call>",
        end="</tool_call>",
        further="{",  # a list is read as well
        noise=" \t\r\n,}]",  # a brace too many is not spoken of
        between="\n",
    )

    def detect(self, template: str) -> bool:
        return "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>"))

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return JsonCallReader(tools, self.syntax.markers, opening="[" if first else "", opened=False)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "arguments")

    def new_id(self) -> str:
        return call_id()
