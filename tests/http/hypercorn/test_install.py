"""The access log has exactly one line for each request, whatever the request contains."""

from __future__ import annotations

import asyncio
import logging

import httpx2
import pytest
from hypercorn.config import Config
from starlette.responses import Response

from aengine.http.hypercorn.install import install
from tests.http.serving import hosting, with_lifespan

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "agent", "logged"),
    [
        ("/x?a=b", "curl", '"GET /x HTTP/1.1" 200 2 "-" "curl"'),
        ("/%0a127.0.0.1%20GET%20/forged%1b[31m", "c", r'"GET /\n127.0.0.1 GET /forged\x1b[31m HTTP/1.1" 200 2 "-" "c"'),
        ("/%22%20200", 'a" "b', r'"GET /\" 200 HTTP/1.1" 200 2 "-" "a\" \"b"'),
        ("/%c2%85%e2%80%a8", "\x9b1m", r'"GET /\x85\u2028 HTTP/1.1" 200 2 "-" "\x9b1m"'),
        ("/%e4%bd%a0", "c", '"GET /你 HTTP/1.1" 200 2 "-" "c"'),
    ],
)
async def test_a_request_cannot_forge_a_log_line(
    path: str, agent: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(asyncio.get_running_loop())
    log = logging.getLogger("tests.access")
    with caplog.at_level(logging.INFO, "tests.access"):
        async with (
            hosting(with_lifespan(Response("ok")), accesslog=log) as (port, _),
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            await client.get(path, headers={"user-agent": agent.encode("latin-1")})  # type: ignore[dict-item]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tests.access"]
    assert line.endswith(logged)
    assert line.isprintable()


async def test_a_format_of_ones_own_is_escaped_too(caplog: pytest.LogCaptureFixture) -> None:
    """Every field is escaped."""
    install(asyncio.get_running_loop())
    config = Config()
    config.accesslog = logging.getLogger("tests.access")
    config.access_log_format = "%(m)s %(U)s %(Uq)s %(q)s %(R)s %(H)s %(a)s %({x-mine}i)s"
    scope = {
        "type": "http",
        "http_version": "1.0",
        "method": "GET",
        "path": "/\n",
        "query_string": b"\t",
        "scheme": "http",
        "headers": [(b"user-agent", b"a\x1b"), (b"x-mine", b"b\x7f")],
    }
    with caplog.at_level(logging.INFO, "tests.access"):
        await config.log.access(scope, None, 0.1)  # type: ignore[arg-type]
    assert caplog.messages == [r"GET /\n /\n?\t \t GET /\n?\t HTTP/1.0 HTTP/1.0 a\x1b b\x7f"]
