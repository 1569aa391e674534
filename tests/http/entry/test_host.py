"""`Host`: a request over loopback with a foreign name was sent by DNS rebinding."""

from __future__ import annotations

import pytest

from aengine.http.entry.middleware import Hosts
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

LOOPBACK = ("127.0.0.1", 8000)


async def passes(host: str | None, *allowed: str, server: tuple[str, int | None] | None = LOOPBACK) -> bool:
    """Whether a request is served. host: one name, or two with a | in between."""
    headers = [] if host is None else [(b"host", one.encode()) for one in host.split("|")]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "server": server}
    return Hosts(allowed).refusal(scope) is None


async def test_a_foreign_name_is_refused_and_the_error_names_the_knob() -> None:
    async with serving() as server:
        for method, path in [("GET", "/health"), ("POST", "/generate"), ("GET", "/"), ("OPTIONS", "/generate")]:
            response = await server.client.request(method, path, headers={"Host": "evil.example:8000"})
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "host_not_allowed"
            assert "AENGINE_ALLOWED_HOSTS" in response.json()["error"]["message"]
            assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:80", "localhost.", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.168.1.5:1", "", None],
)
async def test_localhost_and_addresses_pass(host: str | None) -> None:
    assert await passes(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "1.2.3"),
        *(
            "evil.example@localhost",
            "localhost/evil",
            "localhost:x",
            "[::1",
            "[evil.example]",
            "localhost,evil.example",
        ),
    ],
)
async def test_others_do_not(host: str) -> None:
    assert not await passes(host)


async def test_a_second_host_does_not_lead_around() -> None:
    assert not await passes("localhost|evil.example")
    assert not await passes("evil.example|localhost")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
async def test_every_loopback_address_counts(loopback: str) -> None:
    assert not await passes("evil.example", server=(loopback, 8000))


@pytest.mark.parametrize("server", [("192.168.1.5", 8000), ("::ffff:192.168.1.5", 8000), ("/run/a.sock", None), None])
async def test_over_other_connections_any_name_will_do_unless_some_are_given(server: tuple[str, int] | None) -> None:
    assert await passes("a.example", server=server)
    assert await passes("a.example", "a.example", server=server)
    assert await passes("192.168.1.5", "a.example", server=server)
    assert not await passes("b.example", "a.example", server=server)


async def test_names_that_the_operator_gives() -> None:
    assert await passes("A.example:8000", "a.example")
    assert await passes("a.example", "A.Example:8000")
    assert not await passes("b.a.example", "a.example")
    assert await passes("evil.example", "*")
