"""Checkpoints with random weights call tools in the format of their templates, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest
from tokenizers import AddedToken

from aengine.text.answer.formats.table import call_format_of
from tests.http.demo_server import demo_server
from tests.http.wire import parse_events
from tests.model.checkpoints import write_checkpoint
from tests.text.text_families import byte_level_backend, write_tokenizer

pytestmark = pytest.mark.slow

END = "<|im_end|>"
# A template's text for earlier calls, from which its format is detected; and its special tokens.
FORMATS: dict[str, tuple[str, list[str]]] = {
    "mistral": ("'[TOOL_CALLS]' ~ call.name ~ '[ARGS]' ~ call.arguments | tojson", ["[TOOL_CALLS]", "[ARGS]"]),
    "mistral_list": ("'[TOOL_CALLS] [' ~ call | tojson ~ ']'", ["[TOOL_CALLS]"]),
    "qwen3_coder": (
        "'<tool_call>\\n<function=' ~ call.name ~ '>\\n<parameter=city>\\n' ~ call.arguments.city ~ "
        "'\\n</parameter>\\n</function>\\n</tool_call>'",
        [],
    ),
    "pythonic": ("'[func_name1(params_name1=params_value1)]' ~ call.name", ["<|python_tag|>"]),
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", 'Zürich "x" <y>']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"x": {"enum": [0, 1]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "metric", "tags", "at"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp(request.param)
    written, tokens = FORMATS[request.param]
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}"
        "{% for one in message.tool_calls or [] %}{% set call = one.function %}{{ " + written + " }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
    )
    assert call_format_of([template]) == request.param
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    write_tokenizer(folder, backend, {"chat_template": template, "eos_token": END})
    end, size = backend.token_to_id(END), backend.get_vocab_size()
    write_checkpoint("qwen3", folder, vocab_size=size, eos_token_id=end, max_position_embeddings=4096)
    knobs = {"model": str(folder), "max_num_seqs": 4, "kv_cache_gib": 0.05}
    with (
        demo_server(knobs, reasoning="off") as url,  # its thoughts would never end
        httpx2.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("tool", [TOOL, STRICT], ids=["tool", "strict"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_comes_and_fits_its_schema(server: httpx2.Client, choice: object, tool: dict[str, Any]) -> None:
    asked = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [tool],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
        "temperature": 1.0,
        "max_tokens": 600,
    }
    answer = server.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    [made] = answer.json()["choices"]
    [call] = made["message"]["tool_calls"]
    assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)

    events = parse_events(server.post("/v1/chat/completions", json=asked | {"stream": True}).text)
    pieces = [
        piece["function"]["arguments"]
        for event in events[:-1]  # [DONE] follows
        for one in event["choices"]
        for piece in one["delta"].get("tool_calls") or []
    ]
    assert "".join(pieces) == call["function"]["arguments"]
    assert len([piece for piece in pieces if piece]) > 3

    history = [*asked["messages"], made["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    again = server.post("/v1/chat/completions", json=asked | {"messages": history, "max_tokens": 1})
    assert again.status_code == 200, again.text
