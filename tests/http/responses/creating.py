"""Requests to `POST /v1/responses` of a fake engine."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response

from aengine.text.answer.parser import AnswerFormat
from tests.http.fake_engine import FakeEngine
from tests.http.responses.streams import check_order, parse, without_ids
from tests.http.serving import Server

PATH = "/v1/responses"
QWEN = AnswerFormat(calls="hermes", thoughts=True)
CALL = ["<tool_call>", '\n{"name": "f", ', '"arguments": {"a', '": 1}', "}\n</tool", "_call>"]
F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Changes a file."}


def saying(*words: str, form: AnswerFormat = QWEN) -> FakeEngine:
    engine = FakeEngine()
    engine.words, engine.answer_format = words, form
    return engine


async def respond(server: Server, **body: Any) -> dict[str, Any]:
    """Return a whole response, and check that a stream's last event has the same."""
    body = {"input": "one two", **body}
    answer = await server.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    Response.model_validate(response, strict=True)
    streamed = await server.post(PATH, **body, stream=True)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert without_ids(check_order(parse(streamed.text))) == without_ids(response)
    return response


async def refusal(server: Server, **body: Any) -> dict[str, Any]:
    answer = await server.post(PATH, **{"input": "one", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error
