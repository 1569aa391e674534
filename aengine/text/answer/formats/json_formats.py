"""Formats whose calls are JSON objects: Hermes, Qwen, Phi-4-mini, Granite 3, Command R, R7B and A, Nemotron-H, Apertus,
InternLM, Llama 3.
"""

from __future__ import annotations

from collections.abc import Mapping

from aengine.text.answer.formats.base import CallableTool, CallFormat, CallReader, CallSyntax, Tools
from aengine.text.answer.formats.json_call import JsonCallReader, KeyedCallReader, json_call_rules, keyed_call_rules
from aengine.text.answer.lark import Tokens, literal, marker, sequence


class JsonObjects(CallFormat):
    """The base of formats with a list of JSON objects, or a single one, after a marker."""

    def detect(self, template: str) -> bool:
        return self.syntax.begin in template

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


def _list(begin: str, end: str = "", begins: Mapping[str, str] | None = None) -> CallSyntax:
    """Return the syntax of a list of objects after a marker. end: the marker behind the list; empty: there is none."""
    return CallSyntax(
        begin=begin,
        begins=begins or {},
        opening='"["',
        separator=", ",
        closing=f"]{end}",
        end=end or "]",
        further="{",
        noise=" \t\r\n,}]" if end else " \t\r\n,}",
    )


_BEGIN, _END = "<|tool_call|>", "<|/tool_call|>"


class JsonList(JsonObjects):
    """A list of JSON objects after `<|tool_call|>`: Phi-4-mini, which ends it with `<|/tool_call|>`, and Granite 3.

    Both also begin lists without that token: `functools[{...}]`, and `<tool_call>[{...}]</tool_call>` (Granite 3.1). A
    single object without a list is read as well. ended: a marker follows the list.
    """

    def __init__(self, *, ended: bool) -> None:
        others = {"functools[": ""} if ended else {"<tool_call>": "</tool_call>"}
        self.syntax = _list(_BEGIN, _END if ended else "", others)
        self._ended = ended

    def detect(self, template: str) -> bool:
        if self._ended and "<|tool|>" in template and "<|/tool|>" in template:
            return True
        return _BEGIN in template and (_END in template) == self._ended


class NemotronList(JsonObjects):
    """A list of JSON objects between `<TOOLCALL>` and `</TOOLCALL>`: Nemotron-H and Nemotron Nano 2."""

    syntax = _list("<TOOLCALL>", "</TOOLCALL>")


class ApertusList(JsonObjects):
    """A list of JSON objects whose keys are the names, between `<|tools_prefix|>` and `<|tools_suffix|>`: Apertus."""

    syntax = _list("<|tools_prefix|>", "<|tools_suffix|>")

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return KeyedCallReader(tools, self.syntax.markers, opening="[" if first else "", opened=False)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return keyed_call_rules(rule, tool)


class CohereActions(JsonObjects):
    """A list of JSON objects with an id and `tool_name` between two markers: Command R7B and A."""

    syntax = _list("<|START_ACTION|>", "<|END_ACTION|>")

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "parameters", name='"tool_call_id": "0", "tool_name"')


class CommandR(JsonObjects):
    """A list of JSON objects with `tool_name` in a fence after `Action:`: Command R and R+ of 2024."""

    syntax = CallSyntax(
        begin="Action: ```json",
        begins={"Action:\n```json": "", "Action:```json": ""},
        opening=r'"\n["',
        separator=", ",
        closing="]```",
        end="```",
        further="{",
        noise=" \t\r\n,}]",
    )

    def detect(self, template: str) -> bool:
        return "Action:" in template and "```json" in template and '"tool_name"' in template

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "parameters", name='"tool_name"')


class InternLm(JsonObjects):
    """A JSON object between `<|action_start|><|plugin|>` and `<|action_end|>`: InternLM 2.5 and 3."""

    syntax = CallSyntax(
        begin="<|action_start|>",
        unmarked="<|plugin|>",
        closing="<|action_end|>",
        end="<|action_end|>",
        noise=" \t\r\n}",
        between="",
        inner=("<|plugin|>",),
    )

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return JsonCallReader(tools, self.syntax.markers, opening="<|plugin|>")

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        head = sequence(marker("<|plugin|>", tokens), literal("\n"))
        return [f"{rule}: {head} {rule}_object", *json_call_rules(f"{rule}_object", tool, "parameters")]


class Llama3(CallFormat):
    """A JSON object that is the whole answer, or one after `<|python_tag|>`: Llama 3.1 to 3.3."""

    syntax = CallSyntax(
        begin="<|python_tag|>",
        bare="{",
        before_name='{"name":"',
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
