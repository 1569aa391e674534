"""Every conversation of random blocks gets an answer or a refusal in Anthropic's format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aengine.http.anthropic.bodies import MessageBody, TokenCount
from aengine.http.entry.errors import MessagesErrorBody
from tests.http.demo_server import demo_server

BOUNDED = settings(
    max_examples=max(16, settings.default.max_examples // 2),
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

words = st.text(max_size=12)
junk = st.none() | st.booleans() | st.integers(-3, 3) | words
cached = st.fixed_dictionaries({}, optional={"cache_control": st.just({"type": "ephemeral"}), "of_tomorrow": junk})


def block(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    own = st.fixed_dictionaries({"type": st.just(kind), **fields})
    return st.tuples(own, cached).map(lambda both: both[0] | both[1])


texts = block("text", text=words)
ids = st.sampled_from(["toolu_1", "call_2", ""])
names = st.sampled_from(["get_weather", "other", "a.b"])
objects = st.dictionaries(
    words, st.recursive(junk, lambda inner: st.lists(inner, max_size=2), max_leaves=3), max_size=2
)
calls = block("tool_use", id=ids, name=names, input=objects)
said = st.none() | words | st.lists(texts, max_size=2)
results = block("tool_result", tool_use_id=ids, content=said, is_error=st.booleans())
thoughts = block("thinking", thinking=words, signature=words) | block("redacted_thinking", data=words)
strange = block("image", source=objects) | block("server_tool_use", id=ids, name=names, input=objects) | block("text")
blocks = st.lists(st.one_of(texts, calls, results, thoughts), max_size=4) | st.lists(strange | texts, max_size=2)
turn = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": words | blocks})
fitting = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": words | st.lists(texts | results, max_size=4)}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": words | st.lists(texts | calls | thoughts)}),
)
tool = st.fixed_dictionaries(
    {"name": st.sampled_from(["get_weather", "look"]), "input_schema": st.just({"type": "object", "properties": {}})},
    optional={"description": words, "strict": st.booleans(), "type": st.sampled_from(["custom", "bash_20250124"])},
)
choice = st.fixed_dictionaries(
    {"type": st.sampled_from(["auto", "any", "tool", "none"])},
    optional={"name": st.sampled_from(["get_weather", "other"]), "disable_parallel_tool_use": st.booleans()},
)
thinking = st.fixed_dictionaries(
    {"type": st.sampled_from(["enabled", "disabled", "adaptive", "between_tools"])},
    optional={"budget_tokens": st.integers(0, 2048), "display": st.sampled_from(["omitted", "summarized", "updates"])},
)
requests = st.fixed_dictionaries(
    {
        "messages": st.lists(turn, min_size=1, max_size=3) | st.lists(fitting, min_size=1, max_size=5),
        "max_tokens": st.integers(0, 6),
        "stream": st.booleans(),
    },
    optional={
        "system": words | st.lists(texts, max_size=2),
        "tools": st.lists(tool, max_size=2),
        "tool_choice": choice,
        "thinking": thinking,
        "stop_sequences": st.lists(words, max_size=2),
        "metadata": junk,
        "temperature": st.sampled_from([0, 0.5, 1, 1.0]),
    },
)


@pytest.fixture(scope="module")
def server() -> Iterator[httpx2.Client]:
    with (
        demo_server({"max_model_len": 128}) as url,
        httpx2.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


@pytest.mark.slow
@pytest.mark.hypothesis
def test_every_conversation_is_answered_or_refused(server: httpx2.Client) -> None:
    statuses: Counter[int] = Counter()

    @BOUNDED
    @given(requests)
    def holds(body: dict[str, Any]) -> None:
        answer = server.post("/v1/messages", content=json.dumps(body))
        count = server.post("/v1/messages/count_tokens", content=json.dumps(body))
        statuses[answer.status_code] += 1
        if answer.status_code != 200:
            assert answer.status_code == 400, answer.text
            refusal = msgspec.json.decode(answer.content, type=MessagesErrorBody, strict=True)
            assert refusal.request_id == answer.headers["request-id"]
            return
        tokens = msgspec.json.decode(count.content, type=TokenCount).input_tokens
        message = msgspec.convert(read_events(answer.text), MessageBody) if body["stream"] else decode(answer.content)
        usage = message.usage
        assert tokens == usage.input_tokens + usage.cache_read_input_tokens
        assert usage.output_tokens <= body["max_tokens"]
        assert message.stop_reason is not None

    holds()
    assert statuses[200] > BOUNDED.max_examples // 10
    assert statuses[400]


def decode(content: bytes) -> MessageBody:
    return msgspec.json.decode(content, type=MessageBody)


def read_events(text: str) -> dict[str, Any]:
    """Return the last state of a streamed message, without its content."""
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n'), text
    events = [json.loads(part.partition("\ndata: ")[2]) for part in text.split("\n\n") if part]
    message: dict[str, Any] = events[0]["message"]
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}
