"""The outermost middleware, which every request passes before it is routed. A check without anything to judge is not
called.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.config import ServerConfig
from aengine.http.door.anthropic_errors import REQUEST_ID, id_headers
from aengine.http.door.auth import ApiKeyMiddleware
from aengine.http.door.errors import error_response
from aengine.http.door.host import Hosts
from aengine.http.door.origin import OriginMiddleware
from aengine.http.door.paths import ServedPaths

_USABLE = re.compile(r"[!-~]{1,128}")  # visible ASCII: nothing that could split a header or spoil a log


class Door:
    """Sets `X-Request-Id` (the client's own, or a new one) on every response, for Anthropic's clients under their name
    as well; then checks host, origin, key and path.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, paths: ServedPaths) -> None:
        self._hosts = Hosts(config.allowed_hosts)
        # Behind the keys, which know no path but as it was sent.
        self._paths = paths
        self._app = app
        self._inside: ASGIApp = ApiKeyMiddleware(self._route, config.api_keys) if config.api_keys else self._route
        self._from_pages = OriginMiddleware(self._inside, config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        headers = Headers(scope=scope)
        requested = headers.get("x-request-id", "")
        scope[REQUEST_ID] = requested if _USABLE.fullmatch(requested) else uuid.uuid4().hex
        own = Headers(id_headers(scope)).raw

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
        if scope["type"] == "http" and scope["path"] not in self._paths.exact:
            scope["path"] = self._paths.canonical(scope["path"])
        await self._app(scope, receive, send)
