"""Messages that call tools reach a template in the way that it takes them."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.text.template.control_tokens import ControlTokens
from aengine.text.template.rendering import ChatTemplates

OBJECTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name, c.function.arguments.items() | list }}{% endfor %}"
)
TEXTS = (  # as DeepSeek's do: arguments are joined to texts, and messages without content have none
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ c['function']['name'] + '|' + c['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ '' + m['content'] }}{% endif %}"
)
THINKING = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ 'yes' if thinking else 'no' }}"


def templates(source: str) -> ChatTemplates:
    return ChatTemplates("here", {"default": source}, {}, ControlTokens([], foreign=source))


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize(
    ("source", "written"),
    [(OBJECTS + "{% endfor %}", "('f', [('a', 1)])"), (TEXTS + "{% endfor %}", 'f|{"a": 1}')],
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
    assert templates(THINKING).render([{"role": "user", "content": "hi"}], None, kwargs)[0] == told
