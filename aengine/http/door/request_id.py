"""`X-Request-Id`: the client's own, or one of ours, in every response."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_USABLE = re.compile(r"[!-~]{1,128}")  # visible ASCII: nothing that could split a header or spoil a log


_KEY = "aengine.request_id"  # in the ASGI scope


def request_id_of(scope: Scope) -> str:
    """The id that the answer to this request tells."""
    request_id: str = scope[_KEY]
    return request_id


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        told = given if _USABLE.fullmatch(given) else uuid.uuid4().hex
        scope[_KEY] = told
        request_id = told.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)
