"""Requests whose whole answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aengine.requests.sampling_params import SamplingParams
from aengine.types import Fragment
from tests.http.fake_engine import CACHED_TOKENS, FakeEngine, FakeStream
from tests.http.serving import Server, serving
from tests.http.wire import REQUEST_ID, ask

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json", "x-request-id": REQUEST_ID}
EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-request-id": REQUEST_ID,
}
HELLO = {"messages": [{"role": "user", "content": "hello there"}]}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALL_THE_TIME = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def post(server: Server, path: str, **body: Any) -> Any:
    """Return the body of a whole answer."""
    answer = await ask(server, "POST", path, body)
    assert answer[:2] == (200, JSON)
    return answer.body


async def streamed(server: Server, path: str, **body: Any) -> list[Any]:
    """Return the events before [DONE]."""
    answer = await ask(server, "POST", path, body)
    assert answer[:2] == (200, EVENTS)
    *events, done = answer.body
    assert done == "[DONE]"
    return events


def usage(prompt: int, completion: int, cached: int = CACHED_TOKENS) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Saying(FakeEngine):
    """Answers each prompt with these fragments, all at once."""

    def __init__(self, answer: Callable[[Any], Sequence[Fragment]]) -> None:
        super().__init__(held=True)
        self._answer = answer

    async def submit(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> FakeStream:
        stream = await super().submit(prompt, params, **options)
        stream.put(*self._answer(prompt))
        return stream


async def held(path: str, *fragments: Fragment, **body: Any) -> Any:
    """Return the server's answer from these fragments."""
    async with serving(Saying(lambda prompt: fragments)) as server:
        return await (streamed if body.get("stream") else post)(server, path, **body)
