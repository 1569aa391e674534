"""The outermost middleware, which every request passes before it is routed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from ipaddress import IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.config import ServerConfig
from aengine.http.entry.auth import ApiKeyMiddleware
from aengine.http.entry.context import context_of, id_headers
from aengine.http.entry.errors import HTTPError, error_response
from aengine.http.entry.origin import OriginMiddleware
from aengine.http.entry.paths import ServedPaths

_USABLE = re.compile(r"[!-~]{1,128}")  # visible ASCII, which cannot split a header or forge a log line
_NO_WEBSOCKET = HTTPError(404, "not_found", "this server has no WebSocket: send ordinary requests over HTTP")
_NAME = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:/?#@\[\]]*))(?::\d*)?")


class EntryMiddleware:
    """Adds the request's id to every response, then checks host, origin, key and path."""

    def __init__(self, app: ASGIApp, config: ServerConfig, paths: ServedPaths) -> None:
        self._hosts = Hosts(config.allowed_hosts)
        self._paths = paths
        self._app = app
        self._inside: ASGIApp = ApiKeyMiddleware(self._route, config.api_keys) if config.api_keys else self._route
        self._from_pages = OriginMiddleware(self._inside, config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        headers = Headers(scope=scope)
        context_of(scope).request_id = request_id_of(headers)
        own = [(name.encode(), value.encode()) for name, value in id_headers(scope).items()]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *own]
            await send(message)

        if (refusal := self._hosts.refusal(scope)) is not None:
            await error_response(refusal)(scope, receive, send_with_id)
        elif "origin" in headers:
            await self._from_pages(scope, receive, send_with_id)
        else:
            await self._inside(scope, receive, send_with_id)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if dict(scope["headers"]).get(b"upgrade", b"").lower() == b"websocket":
                await error_response(_NO_WEBSOCKET)(scope, receive, send)
                return
            if scope["path"] not in self._paths.exact:
                scope["path"] = self._paths.canonical(scope["path"])
        await self._app(scope, receive, send)


def request_id_of(headers: Headers) -> str:
    """Return the client's `X-Request-Id` if it is usable, else a new id."""
    requested = headers.get("x-request-id", "")
    return requested if _USABLE.fullmatch(requested) else uuid.uuid4().hex


class Hosts:
    """Checks `Host`: over loopback only `localhost`, IP addresses and the names in `allowed_hosts` are served.

    A web page may make its own name resolve to 127.0.0.1 (DNS rebinding). Its browser then treats this server as the
    page's own: `Origin` and `Host` agree, and only the name reveals the attack. Starlette's TrustedHostMiddleware is
    not used: it handles neither IP addresses nor local connections, and it answers in plain text.

    Over other connections every name is served, unless `allowed` has names. A request without `Host` does not come
    from a browser.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = {"localhost", "127.0.0.1", "::1", "", *map(_name_of, allowed)}
        self._any = "*" in allowed
        self._everywhere = bool(allowed)

    def refusal(self, scope: Scope) -> HTTPError | None:
        """Return the refusal of a request with a foreign `Host`; None if the host is served."""
        if self._any:
            return None
        for host in Headers(scope=scope).getlist("host"):
            name = _name_of(host)
            if name not in self._allowed and not _is_address(name) and (self._everywhere or _is_loopback(scope)):
                return HTTPError(
                    403,
                    "host_not_allowed",
                    f"Host: {host[:100]!r} is not one of this server's names: localhost, IP addresses, and names in "
                    "the knob allowed_hosts (--allowed-hosts, AENGINE_ALLOWED_HOSTS)",
                )
        return None


def _name_of(host: str) -> str | None:
    """Return the name or address without the port; None if it is malformed."""
    found = _NAME.fullmatch(host.strip().lower())
    return None if found is None else found["address"] or (found["name"] or "").removesuffix(".")


def _is_address(name: str | None) -> bool:
    try:
        ip_address(name or "")
    except ValueError:
        return False
    return True


def _is_loopback(scope: Scope) -> bool:
    """Whether the client connected to an address that only this machine can reach."""
    try:
        address = ip_address((scope.get("server") or ("",))[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
