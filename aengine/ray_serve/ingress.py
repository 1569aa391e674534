"""The application's door on Ray Serve: reads a request's body, hashes its prompt, and passes on what an engine answers.

An engine is chosen by the router of the handle (`request_router`). What an engine told of its cache goes to the router
with the next call, as the router lives in a loop of its own.
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
from aengine.http.door.auth import ApiKeyMiddleware
from aengine.http.door.body import BodyReader
from aengine.ray_serve.all_replicas import CHANGES, TO_ALL, merged
from aengine.ray_serve.answer import Answer, identified
from aengine.ray_serve.call import FirstToken, Head
from aengine.ray_serve.keepers import Keepers
from aengine.ray_serve.line import Line, Lines
from aengine.ray_serve.replica import Accepted
from aengine.ray_serve.routing.prompt import Prompt, prompt_of

_log = logging.getLogger("aengine")

_LOST = "the replica that carried this request was lost"
_ATTEMPTS = 3
_ALL_SECONDS = 10.0  # for every replica to answer
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


class Ingress:
    """The deployment that Ray's proxy calls."""

    def __init__(self, engines: DeploymentHandle[Any], server: dict[str, Any], accept_timeout: float) -> None:
        config = msgspec.convert(server, ServerConfig)
        name = serve.get_replica_context().replica_tag
        self._forwarder = Forwarder(engines, config, accept_timeout, name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """For Ray, once this is initialized."""
        return self._forwarder


class Forwarder:
    """An ASGI application that passes each request to an engine, or, where that is its sense, to all of them."""

    def __init__(self, engines: DeploymentHandle[Any], config: ServerConfig, accept_timeout: float, name: str) -> None:
        self._calls = engines.options(stream=True, method_name="serve_http")
        self._engines = engines
        self._bodies = BodyReader(config)
        self._accept_timeout = accept_timeout
        self._name = name
        self._news: list[Accepted] = []
        self._keepers = Keepers() if config.kept_responses else None
        self._begun: list[tuple[int, float]] = []  # calls whose first token came since the last call
        self._lines = Lines(engines.options(stream=True, method_name="line"), name, accept_timeout)
        # Keys are asked for here as well, before a body is read; the rest of the door is each engine's.
        self._inside: ASGIApp = ApiKeyMiddleware(self._http, config.api_keys) if config.api_keys else self._http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            async with self._lines:
                await send({"type": "lifespan.startup.complete"})
                await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            send = identified(scope, send)
            # What a browser asks beforehand carries no key; an engine answers it.
            asked = {name for name, _ in scope["headers"]} if scope["method"] == "OPTIONS" else set()
            preflight = b"access-control-request-method" in asked
            await (self._http if preflight else self._inside)(scope, receive, send)
        else:
            await self._inside(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = Answer(send)
        try:
            body = bytes(await self._bodies.read(Request(scope, receive))) if scope["method"] == "POST" else b""
            asked = {name: scope[name] for name in _SCOPE if name in scope}
            asked["client"], asked["server"] = _pair(scope.get("client")), _pair(scope.get("server"))
            if (scope["method"], scope["path"].rstrip("/")) in TO_ALL:
                await self._to_all(asked, body, answer)
            else:
                await self._to_one(asked, body, answer, receive)
        except ClientDisconnect:
            return
        except AengineError as error:
            await answer.fail(error, scope, receive)

    async def _to_one(self, scope: dict[str, Any], body: bytes, answer: Answer, receive: Receive) -> None:
        """Pass a request to one engine; to another, as long as nothing was answered and its engine is lost."""
        prompt = await asyncio.to_thread(prompt_of, body) if len(body) > 2**18 else prompt_of(body)
        if self._keepers is not None and (keeper := self._keepers.of(scope, body)) is not None:
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
        """An engine's answer. Raises `EngineFailedError` where it is lost, `EngineNotReadyError` without any."""
        news, self._news = [(one.replica, one.changes) for one in self._news], []
        begun, self._begun = self._begun, []
        number, inbox = self._lines.register()
        call = self._calls.remote(
            scope=scope, body=body, prompt=prompt, router=self._name, news=news, begun=begun, number=number
        )
        line: Line | None = None
        try:
            try:
                with anyio.fail_after(self._accept_timeout):
                    accepted = await anext(call)
            except TimeoutError:
                raise EngineNotReadyError("no replica takes requests at the moment") from None
            self._news.append(accepted)
            line = self._lines.enter(accepted.replica, number)
            token = FirstToken()
            async for piece in call:
                if token.comes_with(piece) and not isinstance(piece, Head):
                    self._begun.append((number, time.monotonic()))
                if isinstance(piece, Head) and self._keepers is not None:
                    self._keepers.answered(scope, piece, accepted.replica)
                yield piece
                if isinstance(piece, Head) and piece.line is not None:
                    self._lines.follow(line, number, piece.line)
                    async for more in inbox.pieces():
                        if token.comes_with(more):
                            self._begun.append((number, time.monotonic()))
                        yield more
        except (AengineError, StopAsyncIteration):
            raise
        except Exception as error:  # Ray has many words for an actor that is no more
            _log.warning("a replica was lost: %s", type(error).__name__)
            raise EngineFailedError(_LOST) from error
        finally:
            self._lines.leave(line, number)
            call.cancel()

    async def _to_all(self, scope: dict[str, Any], body: bytes, answer: Answer) -> None:
        """Ask every engine, and put their answers together."""
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"accept"]  # metrics as text
        try:
            found = await self._engines.broadcast("serve_whole", scope, body).results_async(
                timeout_s=None if scope["path"].rstrip("/") in CHANGES else _ALL_SECONDS, return_exceptions=True
            )
        except Exception as error:
            raise EngineNotReadyError("no replica takes requests at the moment") from error
        heads = dict(one for one in found if not isinstance(one, BaseException))
        if not heads:
            raise EngineNotReadyError("no replica takes requests at the moment")
        await answer.send(merged(scope["path"].rstrip("/"), heads))
        await answer.end()


def _pair(address: Any) -> tuple[str, int] | None:
    return None if address is None else (str(address[0]), int(address[1] or 0))
