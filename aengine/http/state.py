"""The state that the handlers share: the server's knobs and the engine, once there is one."""

from __future__ import annotations

from typing import Literal, NamedTuple

from aengine.config import ServerConfig
from aengine.errors import EngineClosedError, EngineNotReadyError, ModelNotFoundError
from aengine.http.door.body import BodyReader, Turnstile
from aengine.http.door.errors import public_message
from aengine.http.engine_like import EngineLike
from aengine.http.fields.unknown import UnknownFields
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.loop_delay import LoopDelay

Phase = Literal["loading", "ready", "failed", "stopping"]


class ChosenModel(NamedTuple):
    """What a request is answered by: the name that its answer shows, and the adapter, None for the model alone."""

    name: str
    adapter: str | None


class ServerState:
    """The phases of a server: loading, then ready or failed, then stopping."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: EngineLike | None = None
        # The names under which the model is listed, that of answers first; empty until the engine is there.
        self.model_names: tuple[str, ...] = config.served_model_name
        self.phase: Phase = "loading"
        self.reason = "the model is still loading"
        self.loop_delay = LoopDelay()
        self.bodies = BodyReader(config)
        self.turnstile = Turnstile()
        self.unknown_fields = UnknownFields()
        self.in_flight: InFlight | None = None  # what is being answered, once the server has been started

    def ready(self, engine: EngineLike) -> None:
        self.engine, self.phase, self.reason = engine, "ready", ""
        self.model_names = self.config.served_model_name or (engine.model_name,)

    def failed(self, error: BaseException) -> None:
        """Note that the engine has failed: every request from now on is answered with the reason, as far as clients may
        know it.
        """
        happened = "could not be started" if self.phase == "loading" else "failed"
        self.engine, self.phase = None, "failed"
        self.reason = f"the engine {happened}: {public_message(error)}"

    def draining(self) -> None:
        """Take no new work from now on; what runs goes on. An engine that failed has neither."""
        if self.phase != "failed":
            self.phase, self.reason = "stopping", "the server is shutting down"

    def stopping(self) -> None:
        self.draining()
        self.engine = None

    @property
    def model_name(self) -> str | None:
        """The name that answers show; None before the engine is there."""
        return next(iter(self.model_names), None)

    def is_model(self, name: str) -> bool:
        """Whether the name is one of the model's own: a listed one or, unless names were given, its folder's path."""
        names = self.config.served_model_name or (self.engine.model_names if self.engine is not None else ())
        return name.strip("/") in {known.strip("/") for known in names}

    def require_engine(self) -> EngineLike:
        """The loaded engine. Raises `EngineNotReadyError` or `EngineClosedError` with the reason when there is none."""
        if self.phase == "stopping":
            raise EngineClosedError(self.reason)
        if self.engine is None:
            raise EngineNotReadyError(self.reason)
        return self.engine

    def choose_model(self, name: str | None) -> ChosenModel:
        """The model or the adapter of that name; the model for None. Raises `ModelNotFoundError`."""
        engine = self.require_engine()
        names = self.model_names
        if name is None or name == names[0] or self.is_model(name):
            return ChosenModel(names[0], None)
        if engine.has_adapter(name):
            return ChosenModel(name, name)
        served = ", ".join(map(repr, names))
        raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server serves {served}")
