"""`/health` (does the engine make progress?), `/ready` (would a request be accepted?) and `/version`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import aengine
from aengine.http.endpoint import json_response
from aengine.http.entry.errors import public_message
from aengine.http.operation import Operation
from aengine.http.state import ServerState

STALL_SECONDS = 60.0  # without a finished step although there is work


class Version(msgspec.Struct, frozen=True):
    """`GET /version`."""

    version: str


HealthWord = Literal["ok", "loading", "ready", "failed", "stopping", "stalled"]


class HealthStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /health`."""

    status: HealthWord
    reason: str = ""


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /ready`."""

    ready: bool
    model: str | None = None
    reason: str = ""


class Health:
    """Answers from the event loop itself, so any answer shows that the loop is alive."""

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._seen = (0, False)  # the number of steps, and whether there was work
        self._since = clock()

    async def health(self, request: Request) -> Response:
        """Answer 200 if the engine works, else 503 with the reason: it loads, stops, has failed or is stalled."""
        status, reason = self._status()
        return _uncached(HealthStatus(status, reason), 200 if status == "ok" else 503)

    def _status(self) -> tuple[HealthWord, str]:
        state = self._state
        if state.phase != "ready" or state.engine is None:
            return state.phase, state.reason
        if state.engine.failure is not None:
            return "failed", public_message(state.engine.failure)
        stats, now = state.engine.stats(), self._clock()
        seen = (stats.steps, stats.running + stats.waiting > 0)
        if seen != self._seen:
            self._seen, self._since = seen, now
        if seen[1] and now - self._since > STALL_SECONDS:
            return "stalled", f"no step has finished for {now - self._since:.0f} s although there is work"
        return "ok", ""

    async def ready(self, request: Request) -> Response:
        """Answer 200 if a request would be accepted, else 503."""
        state = self._state
        if state.engine is None or state.phase != "ready":
            return _uncached(Readiness(False, reason=state.reason), 503)
        if state.engine.failure is not None:
            return _uncached(Readiness(False, reason=public_message(state.engine.failure)), 503)
        if state.engine.refusal:
            return _uncached(Readiness(False, reason=state.engine.refusal), 503)
        return _uncached(Readiness(True, state.model_name), 200)

    async def version(self, request: Request) -> Response:
        return _uncached(Version(aengine.__version__), 200)


def _uncached(payload: object, status: int) -> Response:
    return json_response(payload, status, {"Cache-Control": "no-store"})


def operations(state: ServerState) -> list[Operation]:
    health = Health(state)
    return [
        Operation(
            "GET",
            "/health",
            health.health,
            "Whether requests are served, and why not.",
            answer=HealthStatus,
            other_answers={503: HealthStatus},
        ),
        *(
            Operation(
                method,
                "/ping",
                health.health,
                "The same as /health, as in vLLM.",
                answer=HealthStatus,
                other_answers={503: HealthStatus},
            )
            for method in ("GET", "POST")
        ),
        Operation(
            "GET",
            "/ready",
            health.ready,
            "Whether a request would be accepted.",
            answer=Readiness,
            other_answers={503: Readiness},
        ),
        Operation("GET", "/version", health.version, "Which aengine this is.", answer=Version),
    ]
