"""The chat template of the demo model, and how the corpus renders with it.

A turn is `<|im_start|>role\\n…<|im_end|>\\n`. The system turn holds the system message, the tools (one JSON line each)
and the request to think, if there are any. The model does not think unless `enable_thinking` is true; then it opens
`<think>` itself. Thoughts are not repeated in the history, answers are repeated exactly as they were generated, so that
the next turn of a chat extends the last one's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

IMAGE_TOKEN = "<|image_pad|>"  # stands for an image; the images of a message come before its text
THINKING_REQUEST = "Think between <think> and </think> before you answer."
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

CHAT_TEMPLATE = (
    """{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}{{- '<|image_pad|>' -}}{%- endif -%}
        {%- endfor -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}
                {{- part.text -}}
            {%- elif part.type != 'image' -%}
                {{- raise_exception('this model reads text and images only') -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set parts = namespace(system=[], messages=messages) -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
    {%- set parts.system = [text_of(messages[0].content)] -%}
    {%- set parts.messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set listing = namespace(text='Tools:') -%}
    {%- for tool in tools -%}
        {%- set function = tool.function if tool.function is defined else tool -%}
        {%- set listing.text = listing.text ~ '\\n' ~ (function | tojson) -%}
    {%- endfor -%}
    {%- set how = '\\nTo call a tool, answer:\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' -%}
    {%- set parts.system = parts.system + [listing.text ~ how] -%}
{%- endif -%}
{%- if enable_thinking is defined and enable_thinking -%}
    {%- set parts.system = parts.system + ['"""
    + THINKING_REQUEST
    + """'] -%}
{%- endif -%}
{%- if parts.system -%}
    {{- '<|im_start|>system\\n' ~ parts.system | join('\\n\\n') ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in parts.messages -%}
    {%- set role = 'system' if message.role == 'developer' else message.role -%}
    {%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role ' ~ role) -}}
    {%- endif -%}
    {%- set content = text_of(message.content) -%}
    {%- if role == 'assistant' and '</think>' in content -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>' ~ role ~ '\\n' ~ content -}}
    {%- if role == 'assistant' and message.tool_calls -%}
        {%- for item in message.tool_calls -%}
            {%- set call = item.function if item.function is defined else item -%}
            {{- '\\n' if content or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": ' ~ (call.name | tojson) ~ ', "arguments": ' -}}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
)

Message = Mapping[str, object]
Tool = Mapping[str, object]


class TemplateError(ValueError):
    """The template refused its messages."""


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _tojson(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(CHAT_TEMPLATE)


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    thinking: bool = False,
    add_generation_prompt: bool = False,
) -> str:
    """The chat as the model reads it. Raises `TemplateError` for roles and parts that the template refuses."""
    return _template().render(
        messages=messages,
        tools=list(tools) or None,
        enable_thinking=thinking,
        add_generation_prompt=add_generation_prompt,
    )


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """A model's message."""
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}
