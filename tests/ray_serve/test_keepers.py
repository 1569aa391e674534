"""A request that refers to a kept response goes to the replica that keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aengine.ray_serve import keepers
from aengine.ray_serve.call import Head
from aengine.ray_serve.keepers import Keepers

STREAM = b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_b","'


def scope(path: str, method: str = "POST") -> dict[str, Any]:
    return {"path": path, "method": method}


def test_turns_and_readings_go_where_the_response_was_made() -> None:
    known = Keepers()
    known.note(scope("/v1/responses"), Head(200, [], b'{"id":"resp_a","object":"response"'), "one")
    known.note(scope("/responses/"), Head(200, [], STREAM), "two")
    for name, replica in (("resp_a", "one"), ("resp_b", "two"), ("resp_c", None)):
        body = json.dumps({"input": "more", "previous_response_id": name}).encode()
        assert known.find(scope("/v1/responses"), body) == replica
        assert known.find(scope(f"/v1/responses/{name}", "GET"), b"") == replica
        assert known.find(scope(f"/v1/responses/{name}/input_items", "GET"), b"") == replica


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", b"{"), ("/v1/responses", b""), ("/v1/responses", b'{"previous_response_id":5}'), ("/load", b"")],
)
def test_a_request_without_a_response_goes_anywhere(path: str, body: bytes) -> None:
    known = Keepers()
    known.note(scope("/v1/responses"), Head(200, [], b'{"id":"resp_a"'), "one")
    assert known.find(scope(path), body) is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_MOST", 2)
    known = Keepers()
    for name in ("a", "b", "c"):
        known.note(scope("/v1/responses"), Head(200, [], f'{{"id":"resp_{name}"'.encode()), "one")
    known.note(scope("/v1/responses"), Head(400, [], b'{"id":"resp_d"'), "one")
    found = [known.find(scope(f"/v1/responses/resp_{name}", "GET"), b"") for name in "abcd"]
    assert found == [None, "one", "one", None]
