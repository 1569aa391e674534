"""Pieces of a chunked answer are written directly, without the work of hypercorn and h11."""

from __future__ import annotations

import anyio
import h11
import pytest

from tests.http.fake_engine import FakeEngine
from tests.http.serving import parse_events, raw_request, serving

pytestmark = pytest.mark.anyio

BODY = {"input_ids": [1, 2, 3], "max_tokens": 20}


async def answer(port: int, version: bytes) -> bytes:
    """Return everything up to the end of the connection."""
    request = raw_request("/generate", BODY).replace(b"HTTP/1.1", b"HTTP/" + version)
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        received = b""
        with anyio.fail_after(20):
            async for piece in connection:
                received += piece
    return received


def whole(received: bytes) -> bytes:
    """Return the body as another implementation reads it."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(received)
    reader.receive_data(b"")
    body = b""
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += event.data
    return body


@pytest.mark.parametrize(("version", "by_h11"), [(b"1.1", range(1, 2)), (b"1.0", range(3, 1000))], ids=["1.1", "1.0"])
async def test_pieces(version: bytes, by_h11: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """by_h11: the number of pieces that h11 may send."""
    engine = FakeEngine()
    sent: list[h11.Data] = []
    send = h11.Connection.send

    def counted(self: h11.Connection, event: h11.Event) -> bytes | None:
        if isinstance(event, h11.Data) and self.our_role is h11.SERVER:
            sent.append(event)
        return send(self, event)

    monkeypatch.setattr(h11.Connection, "send", counted)
    async with serving(engine) as server:
        received = await answer(server.port, version)
    assert (b"transfer-encoding: chunked" in received.lower()) == (version == b"1.1")
    events = parse_events(whole(received).decode())
    assert events[-1] == "[DONE]"
    assert "".join(event.get("text", "") for event in events[:-1]) == "".join(engine.words)
    assert len(events) > len(engine.words)
    assert len(sent) in by_h11
