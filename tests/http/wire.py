"""Answers as sent over the wire, for comparison as a whole.

Random ids and times are checked and replaced: an id has its format and is the same in all chunks, and a time is now.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, NamedTuple

import httpx2

from tests.http.serving import Server, parse_events

_ID = re.compile(r'"id":"((?:gen|cmpl|chatcmpl)-)[0-9a-f]{32}"')
_CALL = re.compile(r'"call_[0-9a-f]{24}"')
_CREATED = re.compile(r'"created":(\d+)')
_OF_THE_SERVER = frozenset(
    {"date", "server", "content-length", "transfer-encoding"}
)  # headers of hypercorn and of the body
NOW = 0  # replaces a time
REQUEST_ID = "an-id-of-the-client"


class Answer(NamedTuple):
    """An answer. body: JSON, a list of events, or text."""

    status: int
    headers: dict[str, str]
    body: Any


async def ask(server: Server, method: str, path: str, body: object = None, **headers: str) -> Answer:
    """Send one request with a fixed request id."""
    reported = {"X-Request-Id": REQUEST_ID} | {name.replace("_", "-"): value for name, value in headers.items()}
    content = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
    response = await server.client.request(method, path, content=content, headers=reported)
    return answer_of(response)


def answer_of(response: httpx2.Response) -> Answer:
    headers = {name: value for name, value in response.headers.items() if name not in _OF_THE_SERVER}
    text = timeless(response.text)
    kind = headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        return Answer(response.status_code, headers, parse_events(text))
    return Answer(response.status_code, headers, json.loads(text) if kind == "application/json" else text)


def timeless(text: str) -> str:
    """Replace the id by `gen-ID` or similar, the calls' ids by `call_1`, `call_2`, ..., and the time by `NOW`."""
    assert len({found[0] for found in _ID.finditer(text)}) <= 1, "one answer, one id"
    calls: dict[str, str] = {}
    for found in _CALL.findall(text):
        calls.setdefault(found, f'"call_{len(calls) + 1}"')
    text = _CALL.sub(lambda found: calls[found[0]], _ID.sub(r'"id":"\1ID"', text))
    return _CREATED.sub(lambda found: f'"created":{NOW}' if abs(time.time() - int(found[1])) < 60 else found[0], text)
