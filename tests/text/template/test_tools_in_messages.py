"""Tools in the system message, and calls as text, where the template knows them no other way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aengine.text.tokens.tokenizer import Tokenizer
from tests.text.text_families import byte_level_backend, write_tokenizer

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
