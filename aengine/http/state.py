"""The state that all endpoints share: the server's knobs, its phase, and the engine."""

from __future__ import annotations

from typing import Literal, NamedTuple

from aengine.config import ServerConfig
from aengine.errors import EngineClosedError, EngineNotReadyError, ModelNotFoundError
from aengine.http.engine_like import EngineLike
from aengine.http.entry.body import BodyReader, IterationLimiter
from aengine.http.entry.errors import public_message
from aengine.http.fields.image_sources import ImageLoader
from aengine.http.fields.unknown import UnknownFields
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.loop_delay import LoopDelay

Phase = Literal["loading", "ready", "failed", "stopping"]


class ChosenModel(NamedTuple):
    """The model that answers a request: its name in the answer, and the adapter, or None."""

    name: str
    adapter: str | None


class ServerState:
    """The state of a server. Its phases are loading, then ready or failed, then stopping."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises `ConfigError` for a malformed host in `image_url_hosts`."""
        self.config = config
        self.engine: EngineLike | None = None
        # The names under which the model is listed; answers show the first. Empty until the engine is ready.
        self.model_names: tuple[str, ...] = config.served_model_name
        self.phase: Phase = "loading"
        self.reason = "the model is still loading"
        self.loop_delay = LoopDelay()
        self.bodies = BodyReader(config)
        self.iteration_limiter = IterationLimiter()
        self.image_loader = ImageLoader(config)
        self.unknown_fields = UnknownFields()
        self.in_flight: InFlight | None = None  # set when the server starts

    def mark_ready(self, engine: EngineLike) -> None:
        """Begin to serve requests with the engine."""
        self.engine, self.phase, self.reason = engine, "ready", ""
        self.model_names = self.config.served_model_name or (engine.model_name,)

    def mark_failed(self, error: BaseException) -> None:
        """Refuse all requests, because the engine has failed. The answers have the public part of the reason."""
        happened = "could not be started" if self.phase == "loading" else "failed"
        self.engine, self.phase = None, "failed"
        self.reason = f"the engine {happened}: {public_message(error)}"

    def mark_draining(self) -> None:
        """Refuse new requests. Running ones continue, unless the engine has failed."""
        if self.phase != "failed":
            self.phase, self.reason = "stopping", "the server is shutting down"

    def mark_stopping(self) -> None:
        """Refuse new requests, and drop the engine."""
        self.mark_draining()
        self.engine = None

    @property
    def model_name(self) -> str | None:
        """The name in answers; None until the engine is ready."""
        return next(iter(self.model_names), None)

    def is_model(self, name: str) -> bool:
        """Whether the name is one of the model's: a listed name or, without configured names, the folder's path."""
        names = self.config.served_model_name or (self.engine.model_names if self.engine is not None else ())
        return name.strip("/") in {known.strip("/") for known in names}

    def require_engine(self) -> EngineLike:
        """Return the engine. Raises `EngineNotReadyError` or `EngineClosedError` with the reason if there is none."""
        if self.phase == "stopping":
            raise EngineClosedError(self.reason)
        if self.engine is None:
            raise EngineNotReadyError(self.reason)
        return self.engine

    def choose_model(self, name: str | None) -> ChosenModel:
        """Return the model or adapter of this name; the model for None. Raises `ModelNotFoundError`."""
        engine = self.require_engine()
        names = self.model_names
        if name is None or name == names[0] or self.is_model(name):
            return ChosenModel(names[0], None)
        if engine.has_adapter(name):
            return ChosenModel(name, name)
        served = ", ".join(map(repr, names))
        raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server serves {served}")
