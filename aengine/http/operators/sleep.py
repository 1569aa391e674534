"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping` as in vLLM, and `POST /reload`."""

from __future__ import annotations

from typing import Annotated, cast

import anyio.to_thread
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from aengine.errors import CheckpointError, InvalidRequestError
from aengine.http.endpoint import json_response
from aengine.http.engine_like import EngineLike
from aengine.http.entry.body import decode
from aengine.http.entry.errors import HTTPError, public_message
from aengine.http.operation import ALL_ERRORS, ENGINE_ERRORS, NAME_ERRORS, Operation
from aengine.http.operators.folders import folder_below
from aengine.http.state import ServerState
from aengine.types import SleepMode


class SleepState(msgspec.Struct, frozen=True):
    """`GET /is_sleeping`, `POST /sleep` and `POST /wake_up`."""

    is_sleeping: bool


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /reload`."""

    folder: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None  # None: the model's own folder


class Reloaded(msgspec.Struct, frozen=True):
    """`POST /reload`."""

    reloaded: bool = True


_decoder = msgspec.json.Decoder(ReloadRequest)


class Sleep:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def sleep(self, request: Request) -> Response:
        """Free the device's memory. The answer comes when it is free."""
        engine = self._engine(request)
        level = request.query_params.get("level", "1")
        mode = request.query_params.get("mode", "wait")
        await engine.sleep(int(level) if level in ("0", "1", "2") else -1, mode=cast(SleepMode, mode))
        return json_response(SleepState(engine.is_sleeping))

    async def wake_up(self, request: Request) -> Response:
        """Allocate the device's memory again. The answer comes when requests are served."""
        engine = self._engine(request)
        if request.query_params.getlist("tags"):
            raise InvalidRequestError("tags: weights and pages are woken together; leave it out", "tags")
        await engine.wake_up()
        return json_response(SleepState(engine.is_sleeping))

    async def is_sleeping(self, request: Request) -> Response:
        return json_response(SleepState(self._state.require_engine().is_sleeping))

    async def reload(self, request: Request) -> Response:
        """Replace the loaded weights. The answer comes when requests are served with the new ones."""
        data = await self._state.bodies.read(request)
        engine = self._state.require_engine()
        folders = self._state.config.reload_folders
        if not folders:
            raise HTTPError(404, "not_found", "POST /reload: the server's knob reload_folders is empty")
        body = decode(data or b"{}", _decoder)
        folder = None
        if body.folder is not None:
            folder = await anyio.to_thread.run_sync(folder_below, folders, body.folder)
            if folder is None:
                raise HTTPError(
                    404, "folder_not_found", "folder: no such folder below those of the server's knob reload_folders"
                )
        try:
            await engine.reload(folder)
        except CheckpointError as error:
            raise HTTPError(400, "weights_refused", public_message(error)) from error
        return json_response(Reloaded())

    def _engine(self, request: Request) -> EngineLike:
        engine = self._state.require_engine()
        if not engine.sleep_mode:
            raise HTTPError(
                404, "not_found", f"{request.method} {request.scope['path']}: the engine's knob sleep_mode is off"
            )
        return engine


def operations(state: ServerState) -> list[Operation]:
    sleeping = Sleep(state)
    return [
        Operation(
            "POST",
            "/sleep",
            sleeping.sleep,
            "Free the device's memory.",
            answer=SleepState,
            refusals=(400, *NAME_ERRORS, *ENGINE_ERRORS),
            query={"level": "integer", "mode": "string"},
        ),
        Operation(
            "POST",
            "/wake_up",
            sleeping.wake_up,
            "Allocate the memory again, and serve.",
            answer=SleepState,
            refusals=(400, *NAME_ERRORS, *ENGINE_ERRORS),
        ),
        Operation(
            "GET",
            "/is_sleeping",
            sleeping.is_sleeping,
            "Whether the engine sleeps.",
            answer=SleepState,
            refusals=ENGINE_ERRORS,
        ),
        Operation(
            "POST",
            "/reload",
            sleeping.reload,
            "Replace the loaded weights.",
            body=ReloadRequest,
            answer=Reloaded,
            refusals=ALL_ERRORS,
        ),
    ]
