"""Chats laid out for templates that read calls, results or tools in their own way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from aengine.errors import InvalidRequestError
from aengine.text.template.control_tokens import ControlTokens
from aengine.text.template.layouts import harmony_messages, with_tool_responses
from aengine.text.template.rendering import ChatTemplates
from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import byte_level_backend, write_tokenizer

# The published template's treatment of a chat, in a few lines.
TEMPLATE = """
{%- set last = namespace(name=none) -%}
Reasoning: {{ reasoning_effort or 'medium' }}
{%- for tool in tools or [] %} // {{ '' + tool.function.description }}{{ tool.function.name }}{% endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and 'tool_calls' in message -%}
    {%- set call = message.tool_calls[0].function -%}
    {%- if message.content and message.thinking -%}{{ raise_exception('either content or thinking') }}
    {%- elif message.content or message.thinking -%}
      {{ '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
    {%- endif -%}
    {{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson }}<|call|>
    {%- set last.name = call.name -%}
  {%- elif message.role == 'tool' -%}
    {{ '<|start|>functions.' + last.name + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
  {%- else -%}
    {{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
  {%- endif -%}
{%- endfor -%}
"""


def called(name: str, id: str) -> dict[str, Any]:  # noqa: A002  the field's name
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}


def rendered(*messages: dict[str, Any], **options: Any) -> str:
    templates = ChatTemplates("here", {"default": TEMPLATE}, {}, ControlTokens([], foreign=TEMPLATE), harmony=True)
    return templates.render([{"role": "user", "content": "hi"}, *messages], **options)[0].partition("hi<|end|>")[2]


F = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
G = F.replace("functions.f", "functions.g")


def test_calls_and_their_results_alternate() -> None:
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("2", "1")]  # noqa: A001
    assistant = {"role": "assistant", "reasoning_content": "hm", "tool_calls": [called("f", "1"), called("g", "2")]}
    text = rendered(assistant, *results, {"role": "assistant", "content": "so"})
    first = '<|start|>functions.f to=assistant<|message|>"1"<|end|>'
    second = '<|start|>functions.g to=assistant<|message|>"2"<|end|>'
    thought = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
    assert text == f"{thought}{F}{first}{G}{second}<|start|>assistant<|message|>so<|end|>"


def test_results_without_ids_belong_to_the_calls_in_their_order() -> None:
    results = [{"role": "tool", "content": text} for text in "abc"]
    text = rendered({"role": "assistant", "tool_calls": [called("f", "1"), called("g", "2")]}, *results)
    assert [part.partition(" ")[0] for part in text.split("<|start|>functions.")[1:]] == ["f", "g", "g"]
    assert text.index(G) < text.index('"b"')


@pytest.mark.parametrize("lay_out", [harmony_messages, with_tool_responses])
def test_the_time_grows_with_the_calls_not_with_their_square(lay_out: Any) -> None:
    calls = [called("f", str(number)) for number in range(20_000)]
    results = [{"role": "tool", "tool_call_id": str(number), "content": ""} for number in reversed(range(20_000))]
    started = time.thread_time()
    laid_out = lay_out([{"role": "assistant", "tool_calls": calls}, *results])
    assert time.thread_time() - started < 1  # 400 million comparisons take several seconds
    first = laid_out[1] if lay_out is harmony_messages else laid_out[0]["tool_responses"][0]
    assert first == (results[-1] if lay_out is harmony_messages else {"name": "f", "response": ""})


def test_a_preamble_beside_a_call_joins_the_thought() -> None:
    message = {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [called("f", "1")]}
    assert rendered(message) == f"<|start|>assistant<|channel|>analysis<|message|>hm\n\nI look.<|end|>{F}"


def test_no_calls_are_none() -> None:
    assert rendered({"role": "assistant", "content": "a", "tool_calls": []}) == "<|start|>assistant<|message|>a<|end|>"


@pytest.mark.parametrize(("asked", "told"), [("none", "low"), ("minimal", "low"), ("high", "high"), (None, "medium")])
def test_efforts_are_those_that_the_model_knows(asked: str | None, told: str) -> None:
    kwargs = None if asked is None else {"reasoning_effort": asked}
    templates = ChatTemplates("here", {"default": TEMPLATE}, {}, ControlTokens([], foreign=TEMPLATE), harmony=True)
    tools = [{"type": "function", "function": {"name": "f"}}]
    text, _ = templates.render([{"role": "user", "content": "hi"}], tools, template_kwargs=kwargs)
    assert text.startswith(f"Reasoning: {told} // f<")


@pytest.mark.parametrize(
    ("source", "tool", "expected"),
    [
        (  # Qwen3-Coder's
            "{% for tool in tools %}{{ tool.function.name }}{{ tool.function.parameters.keys() | list }}{% endfor %}",
            {"name": "f", "description": "d"},
            "f['type', 'properties']",
        ),
        (  # Seed-OSS's
            "{% for tool in tools %}{{ tool.function.name }}{{ tool.function.parameters.properties.items() | list }}"
            "{% endfor %}",
            {"name": "f", "description": "d", "parameters": {"type": "object"}},
            "f[]",
        ),
        (
            "{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}",
            {"name": "f", "parameters": {}},
            '{"name": "f", "parameters": {}}',
        ),
        (  # gpt-oss's and Apertus'
            "{% for tool in tools %}{{ tool.function.name }}{% for one in tool.function.parameters.properties.values() "
            "%}{{ ' = ' + (one.default if one.enum else one.default | tojson) }}{% endfor %}{% endfor %}",
            {"name": "f", "parameters": {"properties": {"a": {"enum": [1, 2], "default": 2}, "b": {"default": "x"}}}},
            'f = 2 = "x"',
        ),
    ],
)
def test_tools_get_what_they_leave_out_if_the_template_fails_without(
    source: str, tool: dict[str, Any], expected: str
) -> None:
    templates = ChatTemplates("here", {"default": source}, {}, ControlTokens([]))
    tools = [{"type": "function", "function": tool}]
    assert templates.render([{"role": "user", "content": "hi"}], tools)[0] == expected


@pytest.mark.parametrize("harmony", [False, True])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}{% endfor %}", "f: "),
        (  # as Command R's and gpt-oss's first templates
            "{% for tool in tools %}{{ tool.function.name }}{% for name, one in "
            "tool.function.parameters.properties.items() %}({{ name + ': ' + one.description }}){% endfor %}"
            "{% endfor %}",
            "f(a: )(b: B)",
        ),
        (
            "{% for tool in tools %}{{ tool.function.description + (tool.function | tojson) }}{% endfor %}",
            '{"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}, '
            '"b": {"description": "B"}}}, "description": ""}',
        ),
        ("{% for tool in tools %}{{ tool.function.name, tool.function | length }}{% endfor %}", "('f', 2)"),
    ],
)
def test_tools_get_empty_descriptions_if_the_template_fails_without(source: str, expected: str, harmony: bool) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"description": "B"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    templates = ChatTemplates("here", {"default": source}, {}, ControlTokens([]), harmony=harmony)
    assert templates.render([{"role": "user", "content": "hi"}], tools)[0] == expected


IN_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not "
    "none %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endif %}{% endfor %}"
)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["Łódź"]}}}},
    }
]


@pytest.mark.anyio
async def test_tools_go_where_the_template_looks_for_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": IN_SYSTEM}))
    offered = json.dumps([tool["function"] for tool in TOOLS], ensure_ascii=False)

    async def text(*messages: dict[str, Any]) -> str:
        return tokenizer.decode(await tokenizer.encode_chat(list(messages), TOOLS), False)

    user = {"role": "user", "content": "hi"}
    assert await text(user) == f"<|system|><|tool|>{offered}<|/tool|><|user|>hi"
    assert (
        await text({"role": "system", "content": "Be."}, user) == f"<|system|>Be.<|tool|>{offered}<|/tool|><|user|>hi"
    )
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    written = '<|assistant|>functools[{"name": "f", "arguments": {"a": 1}}]<|tool|>1'
    assert (await text(user, call, {"role": "tool", "content": "1"})).endswith(written)
    assert (tokenizer.answer_format.calls, tokenizer.answer_format.sees_tools) == ("phi4", True)


# GLM-4's two published templates: which fields of messages they read, and the texts by which they are known.
IN_A_LIST = (
    "{% for item in messages %}{% if item['tools'] is defined %}<|system|>{% for tool in item['tools'] %}"
    "{% if tool['type'] == 'function' %}## {{ tool['function']['name'] }}{% endif %}{% endfor %}"
    "请使用 Json 格式表示调用的参数{% endif %}{% if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}\n"
    "{{ item['content'] }}{% endif %}{% endfor %}"
)
AS_A_VARIABLE = (
    "{% if tools %}<|system|>{% for tool in tools %}## {{ tool.function.name }}{% endfor %}"
    "请使用 Json 格式表示调用的参数{% endif %}{% for message in messages %}{% set meta = message.get('metadata', '') %}"
    "{% if message.role in ('user', 'assistant', 'observation') %}<|{{ message.role }}|>{{ meta }}\n"
    "{{ message.content.strip() }}{% endif %}{% endfor %}"
)


@pytest.mark.anyio
@pytest.mark.parametrize("template", [IN_A_LIST, AS_A_VARIABLE])
async def test_glm4_reads_calls_as_metadata_and_results_as_observations(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level_backend(), {"chat_template": template}))
    assert (tokenizer.answer_format.calls, tokenizer.answer_format.sees_tools) == ("glm4", True)
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [called("f", "1"), called("g", "2")]},
        {"role": "tool", "tool_call_id": "1", "content": "so"},
        {"role": "tool", "tool_call_id": "2", "content": "no"},
        {"role": "assistant", "content": "Well."},
    ]
    turns = (
        '<|user|>\nhi<|assistant|>\nI look.<|assistant|>f\n{"a": 1}<|assistant|>g\n{"a": 1}'
        "<|observation|>\nso<|observation|>\nno<|assistant|>\nWell."
    )
    for tools, offered in ((None, ""), (TOOLS, "<|system|>## f请使用 Json 格式表示调用的参数")):
        assert tokenizer.decode(await tokenizer.encode_chat(chat, tools), False) == offered + turns


_LFM2_CALLS = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM2_5 = (  # takes tools and no calls, as LFM2's and LFM2.5's published templates do
    "{% if tools %}<|im_start|>List of tools: {{ tools | tojson }}<|im_end|>{% endif %}{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if content is not string %}{% set content = content | tojson %}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ content }}<|im_end|>{% endfor %}"
)


@pytest.mark.anyio
async def test_calls_are_written_as_lfm2_writes_them(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _LFM2_CALLS])
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, {"chat_template": LFM2_5}))
    assert tokenizer.answer_format.calls == "lfm2"
    begin, end = _LFM2_CALLS
    arguments = {"a": f'"{end}', "b": [1, None, {"c": True}], "d": 0.5}
    call = {"type": "function", "function": {"name": "g", "arguments": json.dumps(arguments)}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called("f", "1"), call]},
        {"role": "tool", "content": begin},
        {"role": "assistant", "content": "So.", "tool_calls": [called("f", "2")]},
    ]
    ids = await tokenizer.encode_chat(chat)
    written = f'{begin}[f(a=1), g(a={json.dumps(arguments["a"])}, b=[1, None, {{"c": True}}], d=0.5)]{end}'
    assert tokenizer.decode(ids, False) == (
        f"<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n{written}<|im_end|>"
        f"<|im_start|>tool\n{begin}<|im_end|><|im_start|>assistant\n{begin}[f(a=1)]{end}So.<|im_end|>"
    )
    # Those that the client wrote are plain text.
    assert [ids.count(tokenizer.token_id(token)) for token in _LFM2_CALLS] == [2, 2]


@pytest.mark.parametrize(
    ("result", "writes"),
    [
        ("{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}", True),
        ("{{ message.content | string }}", False),
        ("{{ raise_exception('text only') }}", False),
    ],
)
def test_a_template_writes_images_of_results_or_not(result: str, writes: bool) -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'tool' %}RESULT{% else %}{{ message.content }}{% endif %}"
        "{% endfor %}"
    ).replace("RESULT", result)
    templates = ChatTemplates("here", {"default": source}, {}, ControlTokens(["<image>"]))
    assert templates.writes_images_of_results("<image>") == writes


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% if tools %}{% set ns = tools | length %}{% endif %}{{ messages[0].content }}", False),
        (
            "{% if messages[0].role == 'system' and tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}",
            True,
        ),
        ("{{ raise_exception('no') if not messages[0].name }}{{ tools }}", True),
    ],
)
def test_a_template_that_reads_tools_takes_them_only_if_it_writes_them(source: str, takes: bool) -> None:
    templates = ChatTemplates("here", {"default": source}, {}, ControlTokens([]))
    assert templates.takes_tools == takes
    if not takes:
        with pytest.raises(InvalidRequestError, match="no place for tools"):
            templates.render([{"role": "user", "content": "hi"}], TOOLS)
