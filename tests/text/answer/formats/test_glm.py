"""Calls of GLM and Hy3, with line breaks between their parts and without, and with mistakes."""

from __future__ import annotations

import json

import pytest

from aengine.config import CallFormatName
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.grammar.calls import CallGrammar
from tests.text.byte_grammars import accepts
from tests.text.cutting import answer, shape

SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}, "required": ["s"]}
NEWER = (
    "<tool_call>f<arg_key>s</arg_key><arg_value>\n a\n</arg_value>"
    "<arg_key>i</arg_key><arg_value>5</arg_value></tool_call>"
)


def parser() -> ToolCallParser:
    return ToolCallParser(FORMATS["glm"], {"f": SCHEMA, "g": None})


def test_line_breaks_between_the_parts_may_be_left_out() -> None:
    (call,) = answer(parser(), NEWER).calls
    assert json.loads(call.arguments) == {"s": "\n a\n", "i": 5}  # line breaks inside the tags belong to the value
    assert accepts(CallGrammar([CallableTool("f", SCHEMA)], FORMATS["glm"]).forced(), NEWER)


def test_strings_are_streamed() -> None:
    reading = parser()
    reading.feed("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>")
    assert reading.feed("a <") == [CallDelta(0, '"a ')]
    assert reading.feed("b\n") == [CallDelta(0, "<b")]
    assert reading.feed("</arg_value>") == [CallDelta(0, '\\n"')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>g</tool_call>", "", [("g", "{}")]),
        ("<tool_call>\n g \n</tool_call>", "", [("g", "{}")]),
        ("<tool_call>h\n</tool_call>", "<tool_call>h\n</tool_call>", []),
        ("<tool_call>g\noops</tool_call>", "oops</tool_call>", [("g", "{}")]),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a", "", [("f", '{"s": "a"}')]),
        ("<tool_call>f\n<arg_key>s</arg_key>\n</tool_call>", "", [("f", "{}")]),
        ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n</tool_call>", "", [("f", '{"s": "a"}')]),
        (
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n<arg_key>i</arg_key><arg_value>3\n</tool_call>",
            "",
            [("f", '{"s": "a", "i": 3}')],
        ),
    ],
)
def test_mistakes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert shape(answer(parser(), text)) == ("", content, calls)
    assert shape(answer(parser(), *text)) == ("", content, calls)


@pytest.mark.parametrize(("form", "end"), [("hy3", ":opensource>"), ("hy3_preview", ">")])
def test_hy3_writes_a_tag_around_all_calls_and_one_after_a_name(form: CallFormatName, end: str) -> None:
    def reading() -> ToolCallParser:
        return ToolCallParser(FORMATS[form], {"f": SCHEMA, "g": None}, lenient=False)

    argument = f"<arg_key{end}s</arg_key{end}<arg_value{end}1</arg_value{end}"
    full = f"<tool_call{end}f<tool_sep{end}{argument}</tool_call{end}"
    for written, content, calls in (
        (f"{full}</tool_calls{end} Done.", "Done.", [("f", '{"s": "1"}')]),
        (f"\n{full}\n<tool_call{end} g <tool_sep{end}\n</tool_call{end}\n", "", [("f", '{"s": "1"}'), ("g", "{}")]),
        (f"<tool_call{end}g</tool_call{end}</tool_calls{end}", "", [("g", "{}")]),
        (f"<tool_call{end}f{argument}</tool_call{end}</tool_calls{end}", "", [("f", '{"s": "1"}')]),
    ):
        text = f"<tool_calls{end}{written}"
        assert shape(answer(reading(), text)) == ("", content, calls)
        assert shape(answer(reading(), *text)) == ("", content, calls)
    text = f"<tool_calls{end}<tool_call{end}h<tool_sep{end}</tool_call{end}</tool_calls{end}"
    assert shape(answer(reading(), *text)) == ("", text, [])
    compact = f"<tool_calls{end}\n{full}\n</tool_calls{end}"  # no line breaks within the call
    assert accepts(CallGrammar([CallableTool("f", SCHEMA)], FORMATS[form]).forced(), compact)
