"""Which web pages may call: none but this server's own, unless the operator names their origins.

A page elsewhere could otherwise use a server on the reader's own machine: the browser sends its requests, even
though it hides the answers. Programs that are no browsers send no `Origin` and are not concerned.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.http.door.errors import HTTPError, error_response

_PREFLIGHT_SECONDS = "600"  # a browser may remember the answer that long
_DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginMiddleware:
    """Refuses a foreign `Origin` with 403; answers preflights of, and adds CORS headers for, the allowed ones."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or _same_host(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
        elif "*" not in self._allowed and origin.lower() not in self._allowed:
            refusal = HTTPError(403, "origin_not_allowed", "requests from this web page's origin are not allowed")
            await error_response(refusal)(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, _with_cors(send, origin))


def _same_host(origin: str, host: str) -> bool:
    try:
        page = urlsplit(origin)
        here = urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        return (
            page.hostname is not None
            and page.hostname == here.hostname
            and (page.port or default) == (here.port or default)
        )
    except ValueError:  # not a host, or not a port
        return False


def _preflight(origin: str, headers: Headers) -> Response:
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "content-type"),
            "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
            "Vary": "Origin, Access-Control-Request-Headers",
        },
    )


def _with_cors(send: Send, origin: str) -> Send:
    cors = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, retry-after"),
        (b"vary", b"Origin"),
    ]

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *cors]
        await send(message)

    return send_with_cors
