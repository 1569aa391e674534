"""Floods of HTTP/2 frames against a real server: each connection is ended soon, and `/health` answers meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated

from tests.cli.running import served
from tests.reliability.prober import probing
from tests.reliability.raw_clients import port_of

pytestmark = pytest.mark.anyio

CONNECTIONS = 4
SECONDS = 5.0  # in which /health answers, on a busy machine; 7 and more when it waited for the floods


def resets() -> bytes:
    """900 requests that are reset at once, in 23 kB."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    for stream in range(1, 1801, 2):
        client.send_headers(
            stream, [(":method", "POST"), (":path", "/generate"), (":scheme", "http"), (":authority", "a")]
        )
        client.reset_stream(stream, ErrorCodes.CANCEL)
    return client.data_to_send()


def priorities() -> bytes:
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    for stream in range(1, 3001, 2):
        client.prioritize(stream, weight=77)
    return client.data_to_send()


async def sent_away(port: int, flood: bytes) -> list[int]:
    """The error codes with which the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(flood)
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        codes: list[int] = []
        async with asyncio.timeout(20):
            while not codes and (data := await reader.read(2**16)):
                events = client.receive_data(data)
                codes += [int(event.error_code or 0) for event in events if isinstance(event, ConnectionTerminated)]
        return codes
    finally:
        writer.close()


@pytest.mark.slow
async def test_floods_end_and_health_answers_meanwhile() -> None:
    with served() as server:
        port = port_of(server)
        async with probing(port) as probes:
            for flood in (resets(), priorities()):
                codes = await asyncio.gather(*[sent_away(port, flood) for _ in range(CONNECTIONS)])
                assert codes == [[ErrorCodes.ENHANCE_YOUR_CALM]] * CONNECTIONS
        server.process.terminate()
        _, said = server.end()
    assert {probe.status for probe in probes} == {200}
    assert max(probe.seconds for probe in probes) < SECONDS
    assert said.count("too many HTTP/2 resets or control frames") == 2 * CONNECTIONS
    assert "Traceback" not in said
