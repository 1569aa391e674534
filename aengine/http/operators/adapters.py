"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields and answers."""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from aengine.errors import InvalidRequestError, renamed_param
from aengine.http.engine_like import EngineLike
from aengine.http.entry.body import decode
from aengine.http.entry.errors import HTTPError
from aengine.http.fields.sampling import Int
from aengine.http.operation import ALL_ERRORS, Operation
from aengine.http.operators.folders import AdapterFolders
from aengine.http.state import ServerState


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str | None = None
    lora_path: Annotated[str, Meta(max_length=4096)] | None = None
    load_inplace: bool | None = None  # replace an adapter of this name


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str | None = None
    lora_int_id: Int | None = None  # accepted without effect


_load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)


class Adapters:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._folders = AdapterFolders(state.config.lora_folders, state.config.lora_hub)

    async def load(self, request: Request) -> Response:
        """Load an adapter. From then on requests may name it as their model."""
        data = await self._state.bodies.read(request)
        engine = self._engine(request)
        body = decode(data, _load_decoder)
        if not body.lora_name or not body.lora_path:
            missing = "lora_path" if body.lora_name else "lora_name"
            raise InvalidRequestError("both lora_name and lora_path must be given", missing)
        if self._state.is_model(body.lora_name):
            raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the model's own name", "lora_name")
        path = await anyio.to_thread.run_sync(self._folders.find, body.lora_path)
        with renamed_param({"name": "lora_name", "path": "lora_path"}):
            await engine.load_adapter(body.lora_name, path, replace=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload an adapter. New requests for it are refused at once; the answer comes when running ones have ended."""
        data = await self._state.bodies.read(request)
        engine = self._engine(request)
        body = decode(data, _unload_decoder)
        if not body.lora_name:
            raise InvalidRequestError("lora_name must be given", "lora_name")
        await engine.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _engine(self, request: Request) -> EngineLike:
        engine = self._state.require_engine()
        if not engine.lora_loading:
            raise HTTPError(404, "not_found", f"POST {request.scope['path']}: the server's knob lora_loading is off")
        return engine


def operations(state: ServerState) -> list[Operation]:
    adapters = Adapters(state)
    return [
        Operation(
            "POST",
            "/v1/load_lora_adapter",
            adapters.load,
            "Load an adapter.",
            body=LoadAdapterRequest,
            refusals=ALL_ERRORS,
        ),
        Operation(
            "POST",
            "/v1/unload_lora_adapter",
            adapters.unload,
            "Unload an adapter.",
            body=UnloadAdapterRequest,
            refusals=ALL_ERRORS,
        ),
    ]
