"""Messages with calls reach a template in the layout that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.text.template.control_tokens import ControlTokens
from aengine.text.template.rendering import ChatTemplates

OBJECTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name, c.function.arguments.items() | list }}{% endfor %}"
)
TEXTS = (  # like DeepSeek's: arguments are joined to texts, and messages without content have none
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + '|' + c['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ '' + m['content'] }}{% endif %}"
)
MARKED = (  # like Qwen3's first: a message without content must have a text
    "{% for m in messages %}{{ m.role + ('thought' if '</think>' in m.content else m.content) }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name, c.function.arguments.items() | list }}{% endfor %}"
)
UNWRITTEN = "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }}f"
THINKING = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ 'yes' if thinking else 'no' }}"


def templates(source: str) -> ChatTemplates:
    return ChatTemplates("here", {"default": source}, {}, ControlTokens([], foreign=source))


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize(
    ("source", "written"),
    [
        (OBJECTS + "{% endfor %}", "('f', [('a', 1)])"),
        (TEXTS + "{% endfor %}", 'f|{"a": 1}'),
        (MARKED + "{% endfor %}", "('f', [('a', 1)])"),
        (UNWRITTEN + "{% endfor %}", "hiff"),
    ],
)
def test_arguments_are_objects_or_texts(source: str, written: str, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert written in templates(source).render(chat)[0]


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [({"enable_thinking": True}, "yes"), ({"thinking": True}, "yes"), ({}, "no")],
)
def test_thinking_is_what_some_templates_call_it(kwargs: dict[str, Any], told: str) -> None:
    assert templates(THINKING).render([{"role": "user", "content": "hi"}], template_kwargs=kwargs)[0] == told


# Like Gemma 4's: a turn has its calls, their results and its content, in this order. The first templates expect
# results in the message with the calls; later ones also accept messages of tools after it.
GATHERED = (
    "{% macro result(name, value) %}[response:{{ name }} {{ value }}]{% endmacro %}"
    "{% for m in messages %}{% if SKIPPED %}{% else %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}[call:{{ c.function.name }}]{% endfor %}"
    "{% for r in m.tool_responses or [] %}{{ result(r.name, r.response) }}{% endfor %}BEHIND"
    "{{ m.content or '' }}{% if m.content or not m.tool_responses %};{% endif %}{% endif %}{% endfor %}"
)
FIRST = GATHERED.replace("SKIPPED", "false").replace("BEHIND", "")
LATER = GATHERED.replace("SKIPPED", "m.role == 'tool'").replace(
    "BEHIND",
    "{% if m.tool_calls %}{% for r in messages[loop.index0 + 1:] if r.role == 'tool' %}"
    "{{ result(m.tool_calls[0].function.name, r.content) }}{% endfor %}{% endif %}",
)


def called(*names: str, content: str | None = None) -> dict[str, Any]:
    calls = [{"id": name * 2, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(name: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name * 2, "content": content}


USER = {"role": "user", "content": "hi"}
DONE = {"role": "assistant", "content": "done"}


@pytest.mark.parametrize(
    ("chat", "written"),
    [
        ([USER, called("f"), result("f", "1")], "<user>hi;<assistant>[call:f][response:f 1]"),
        ([USER, called("f"), result("f", "1"), DONE], "<user>hi;<assistant>[call:f][response:f 1]done;"),
        (
            [USER, called("f", "g"), result("g", "2"), result("f", [{"type": "text", "text": "1"}]), DONE, USER],
            "<user>hi;<assistant>[call:f][call:g][response:g 2][response:f 1]done;<user>hi;",
        ),
        (
            [USER, called("f", content="I look"), result("f", "1"), called("g"), result("g", "2")],
            "<user>hi;<assistant>I look;<assistant>[call:f][response:f 1]<assistant>[call:g][response:g 2]",
        ),
        ([USER, DONE, USER], "<user>hi;<assistant>done;<user>hi;"),
        ([USER, called("f")], "<user>hi;<assistant>[call:f];"),
    ],
)
def test_results_go_into_the_message_that_calls(chat: list[dict[str, Any]], written: str) -> None:
    assert templates(FIRST).render(chat)[0] == written


def test_results_stay_messages_where_the_template_finds_them() -> None:
    assert templates(LATER).render([USER, called("f"), result("f", "1"), DONE])[0] == (
        "<user>hi;<assistant>[call:f][response:f 1];<assistant>done;"
    )


ALONE = (  # like Llama 3.1's
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}[call:{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def test_calls_stand_alone_if_the_template_refuses_two_in_one_message() -> None:
    chat = [USER, called("f", "g"), result("g", "2"), result("f", "1"), DONE, USER, called("f"), result("f", "3")]
    assert templates(ALONE).render(chat)[0] == (
        "<user>hi[call:f{}]<tool>1[call:g{}]<tool>2<assistant>done<user>hi[call:f{}]<tool>3"
    )
    together = ALONE.replace("length != 1", "length == 99")
    assert templates(together).render(chat)[0].startswith("<user>hi[call:f{}]<tool>2<tool>1<assistant>")


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "hm"])
def test_arguments_that_are_no_object_are_shown_as_they_came(arguments: str) -> None:
    """An answer that is cut off within a call has such arguments."""
    chat = [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    assert templates(OBJECTS + "{% endfor %}").render(chat)[0] == f"('f', [('arguments', {arguments!r})])"
    written = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert templates(written).render(chat)[0] == arguments
