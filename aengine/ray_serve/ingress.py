"""The entry on Ray Serve: reads a request's body, hashes its prompt, and forwards an engine's answer.

The router of the handle chooses an engine (`request_router`). It runs in another event loop. Changes of caches that
engines report therefore reach it as arguments of the next call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.config import ServerConfig
from aengine.errors import AengineError, EngineFailedError, EngineNotReadyError
from aengine.http.entry.auth import ApiKeyMiddleware
from aengine.http.entry.body import BodyReader
from aengine.ray_serve.all_replicas import CHANGES, TO_ALL, merge
from aengine.ray_serve.answer import ClientAnswer, with_request_id
from aengine.ray_serve.call import FirstToken, Head
from aengine.ray_serve.keepers import Keepers
from aengine.ray_serve.line import Line, Lines
from aengine.ray_serve.replica import Accepted
from aengine.ray_serve.routing.prompt import Prompt, read_prompt

_log = logging.getLogger("aengine")

_LOST = "the replica that ran this request was lost"
_NONE_ACCEPTS = "no replica takes requests at the moment"
_ATTEMPTS = 3
_ALL_SECONDS = 10.0  # for every replica to answer
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


class Ingress:
    """The deployment that receives requests from Ray's proxy."""

    def __init__(self, engines: DeploymentHandle[Any], server: dict[str, Any], accept_timeout: float) -> None:
        config = msgspec.convert(server, ServerConfig)
        name = serve.get_replica_context().replica_tag
        self._forwarder = Forwarder(engines, config, accept_timeout, name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; Ray calls it after `__init__`."""
        return self._forwarder


class Forwarder:
    """An ASGI application that forwards each request to one engine, or to all for the paths in `TO_ALL`."""

    def __init__(self, engines: DeploymentHandle[Any], config: ServerConfig, accept_timeout: float, name: str) -> None:
        self._calls = engines.options(stream=True, method_name="serve_http")
        self._engines = engines
        self._bodies = BodyReader(config)
        self._accept_timeout = accept_timeout
        self._name = name
        self._accepted: list[Accepted] = []  # since the last call
        self._keepers = Keepers() if config.kept_responses else None
        self._started: list[tuple[int, float]] = []  # calls that had their first token since the last call, and when
        self._lines = Lines(engines.options(stream=True, method_name="line"), name, accept_timeout)
        # Checks the key before a body is read. Each engine does the other checks.
        self._checked_http: ASGIApp = ApiKeyMiddleware(self._http, config.api_keys) if config.api_keys else self._http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            async with self._lines:
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            send = with_request_id(scope, send)
            # A browser's preflight request has no key; an engine answers it.
            names = {name for name, _ in scope["headers"]} if scope["method"] == "OPTIONS" else set()
            preflight = b"access-control-request-method" in names
            await (self._http if preflight else self._checked_http)(scope, receive, send)
        else:
            await self._checked_http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = ClientAnswer(send)
        try:
            body = bytes(await self._bodies.read(Request(scope, receive))) if scope["method"] == "POST" else b""
            sent = {name: scope[name] for name in _SCOPE if name in scope}
            sent["client"], sent["server"] = _pair(scope.get("client")), _pair(scope.get("server"))
            if (scope["method"], scope["path"].rstrip("/")) in TO_ALL:
                await self._to_all(sent, body, answer)
            else:
                await self._to_one(sent, body, answer)
        except ClientDisconnect:
            return
        except AengineError as error:
            await answer.fail(error, scope, receive)

    async def _to_one(self, scope: dict[str, Any], body: bytes, answer: ClientAnswer) -> None:
        """Forward a request to one engine. If it is lost before it has answered, try another."""
        prompt = await asyncio.to_thread(read_prompt, body) if len(body) > 2**18 else read_prompt(body)
        if self._keepers is not None and (keeper := self._keepers.find(scope, body)) is not None:
            prompt = msgspec.structs.replace(prompt, keeper=keeper)
        for attempt in range(_ATTEMPTS):
            pieces = self._pieces(scope, body, prompt)
            try:
                async for piece in pieces:
                    await answer.send(piece)
                await answer.end()
                return
            except EngineFailedError:
                if answer.started or attempt == _ATTEMPTS - 1:
                    raise
            finally:
                await pieces.aclose()

    async def _pieces(self, scope: dict[str, Any], body: bytes, prompt: Prompt) -> AsyncGenerator[Head | bytes, None]:
        """Yield an engine's answer. Raises `EngineFailedError` for a lost engine, `EngineNotReadyError` without any."""
        changes, self._accepted = [(one.replica, one.changes) for one in self._accepted], []
        started, self._started = self._started, []
        number, inbox = self._lines.register()
        call = self._calls.remote(
            scope=scope,
            body=body,
            prompt=prompt,
            router=self._name,
            cache_changes=changes,
            started=started,
            number=number,
        )
        line: Line | None = None
        try:
            try:
                with anyio.fail_after(self._accept_timeout):
                    accepted = await anext(call)
            except TimeoutError:
                raise EngineNotReadyError(_NONE_ACCEPTS) from None
            self._accepted.append(accepted)
            line = self._lines.enter(accepted.replica, number)
            token = FirstToken()
            async for piece in call:
                if token.is_in(piece) and not isinstance(piece, Head):
                    self._started.append((number, time.monotonic()))
                if isinstance(piece, Head) and self._keepers is not None:
                    self._keepers.note(scope, piece, accepted.replica)
                yield piece
                if isinstance(piece, Head) and piece.line is not None:
                    self._lines.follow(line, number, piece.line)
                    async for more in inbox.pieces():
                        if token.is_in(more):
                            self._started.append((number, time.monotonic()))
                        yield more
        except (AengineError, StopAsyncIteration):
            raise
        except Exception as error:  # Ray raises many types for a dead actor
            _log.warning("a replica was lost: %s", type(error).__name__)
            raise EngineFailedError(_LOST) from error
        finally:
            self._lines.leave(line, number)
            call.cancel()

    async def _to_all(self, scope: dict[str, Any], body: bytes, answer: ClientAnswer) -> None:
        """Forward a request to every engine, and answer with the merged answers."""
        # Without `Accept`, metrics come as text.
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"accept"]
        try:
            found = await self._engines.broadcast("serve_whole", scope, body).results_async(
                timeout_s=None if scope["path"].rstrip("/") in CHANGES else _ALL_SECONDS, return_exceptions=True
            )
        except Exception as error:
            raise EngineNotReadyError(_NONE_ACCEPTS) from error
        heads = dict(one for one in found if not isinstance(one, BaseException))
        if not heads:
            raise EngineNotReadyError(_NONE_ACCEPTS)
        await answer.send(merge(scope["path"].rstrip("/"), heads))
        await answer.end()


def _pair(address: Any) -> tuple[str, int] | None:
    return None if address is None else (str(address[0]), int(address[1] or 0))
