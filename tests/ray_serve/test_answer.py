"""A stream whose replica is lost ends with an error event in its API's format, as on one server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aengine.config import ServerConfig
from aengine.errors import EngineFailedError
from aengine.http.responses.answer import ResponseHead
from aengine.http.responses.bodies import ResponsesRequest
from aengine.http.responses.events import ResponseEventEncoder
from aengine.http.responses.items import Output
from aengine.http.responses.tools import read_tools
from aengine.http.streams import sse
from aengine.ray_serve.answer import LastEvents
from aengine.ray_serve.call import Head
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.text.reading import AnswerReading
from aengine.types import Fragment
from tests.http.responses.streams import parse

LOST = EngineFailedError("the replica is lost")


def head(opening: bytes) -> Head:
    return Head(200, list(sse.HEADERS), opening)


def scope(path: str) -> dict[str, Any]:
    return {"type": "http", "path": path}


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_of_openais_chats_and_our_own_it_is_an_event_with_the_error(path: str) -> None:
    last = LastEvents(head(b"")).encode(LOST, scope(path))
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"


def test_of_anthropics_it_is_the_event_error() -> None:
    last = LastEvents(head(b'event: message_start\ndata: {"type":"message_start"}\n\n')).encode(
        LOST, scope("/v1/messages")
    )
    name, data = last.decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    body = json.loads(data.removeprefix("data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")


def test_of_a_response_numbers_go_on_and_it_has_failed() -> None:
    deceit = '"sequence_number":99\ndata: {"type":"x","sequence_number":98'
    body = ResponsesRequest(input="a", metadata={"sequence_number": deceit})
    tools = read_tools(body)
    reader = AnswerReading(ServerConfig(), AnswerFormat(), tools.use.rules).reader(False, lambda token_id: b"x")
    encoder = ResponseEventEncoder(
        ResponseHead("resp_1", "m", body, SamplingParams(), stored=False),
        Output(summaries=False, encrypted=False, called=tools.called),
        reader,
    )
    opening = encoder.opening()
    stream, last = opening, LastEvents(head(opening))
    events = parse((stream + last.encode(LOST, scope("/v1/responses"))).decode())
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    for text in ("one", deceit, "three"):
        piece = encoder.event(Fragment(text, (1,)))
        last.note(piece)
        stream += piece
    last.note(sse.PING)
    last.note(2 * sse.PING)  # a reader was slow
    events = parse((stream + last.encode(LOST, scope("/v1/responses"))).decode())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    *_, error, failed = events
    assert (error["type"], error["code"]) == ("error", "engine_failed")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["id"] == "resp_1"
