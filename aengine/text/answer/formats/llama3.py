"""A JSON object that the whole answer is, or one behind `<|python_tag|>`: Llama 3.1 to 3.3."""

from __future__ import annotations

from aengine.text.answer.formats.base import CallableTool, CallReader, CallSyntax, Tools, call_id
from aengine.text.answer.formats.json_call import JsonCallReader, json_call_rules
from aengine.text.answer.lark import Tokens


class Llama3:
    syntax = CallSyntax(
        begin="<|python_tag|>",
        bare="{",
        separator="; ",
        further="{",
        noise=" \t\r\n};",  # a brace too many is not spoken of
    )

    def detect(self, template: str) -> bool:
        return "<|python_tag|>" in template or ('{"name": ' in template and '"parameters": ' in template)

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return JsonCallReader(tools, self.syntax.markers)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "parameters")

    def new_id(self) -> str:
        return call_id()
