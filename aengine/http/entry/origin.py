"""Checks `Origin`: only this server's own pages and allowed origins may call.

Without this check any web page could use a server on its reader's machine: the browser sends the page's requests and
only hides the answers. Programs other than browsers send no `Origin` and pass. Starlette's CORSMiddleware adds the
headers for allowed origins, but by itself it would also serve all other pages, only without these headers.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.http.entry.errors import HTTPError, error_response

_PREFLIGHT_SECONDS = 600  # how long a browser may cache the answer
_DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginMiddleware:
    """Refuses a foreign `Origin` with 403, and answers preflights of allowed origins.

    The server's own origin is the one in `Host`, which has been checked before.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._cors = CORSMiddleware(
            app,
            allow_origins=self._allowed,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,  # for a page on the internet that calls a server at home
            expose_headers=("x-request-id", "request-id", "retry-after"),
            max_age=_PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        origin = headers.get("origin")
        if origin is None or _same_host(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
        elif self._allowed & {"*", origin.lower()}:
            await self._cors(scope, receive, send)
        else:
            reason = (
                "requests from this web page's origin are not allowed: the knob allowed_origins lists allowed origins "
                "(--allowed-origins, AENGINE_ALLOWED_ORIGINS)"
            )
            await error_response(HTTPError(403, "origin_not_allowed", reason))(scope, receive, send)


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
    except ValueError:  # malformed host or port
        return False
