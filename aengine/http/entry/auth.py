"""Checks API keys: if the server has keys, every path but `/`, `/health`, `/ping` and `/ready` needs one."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.http.entry.context import context_of
from aengine.http.entry.errors import HTTPError, error_response

# Paths as the router sees them. `/` is the static page, which asks its reader for the key.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready"})


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer <key>` or `x-api-key: <key>` for every path but the open ones.

    CORS preflights carry no credentials; `OriginMiddleware` answers them before this middleware.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        # All digests have the same length, so the time of a comparison does not reveal a key's length.
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] in OPEN_PATHS or self._authorized(scope):
            await self._app(scope, receive, send)
        else:
            refusal = HTTPError(
                401, "invalid_api_key", "an API key is needed: send Authorization: Bearer <key> or x-api-key: <key>"
            )
            await error_response(refusal, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearers) > 1 or len(keys) > 1:
            return False
        for bearer in bearers:
            scheme, _, key = bearer.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key)
        # Anthropic's clients send both if their user has set both. One valid key is enough.
        callers = [caller for key in keys if (caller := self._caller(key.strip())) is not None]
        if callers:
            context_of(scope).caller = callers[0]
        return bool(callers)

    def _caller(self, key: bytes) -> str | None:
        """Return the digest of an accepted key, else None."""
        digest = sha256(key).digest()
        matched = False
        for accepted in self._digests:  # compare with all keys, so that the time does not depend on which one matches
            matched |= hmac.compare_digest(accepted, digest)
        return digest.hex() if matched else None
