"""Requests for embeddings and scores as `/abort` finds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from aengine.http.door.anthropic_errors import REQUEST_ID
from aengine.http.engine_like import EngineLike
from aengine.http.hypercorn.in_flight import ACTIVE_REQUEST, ActiveRequest


@dataclass(frozen=True, slots=True)
class PooledWork:
    """The prompts of one request."""

    engine: EngineLike
    id: str

    def abort(self) -> bool:
        """End them; False: they are still being tokenized, or done."""
        return self.engine.abort(self.id)


@contextmanager
def abortable(request: Request, engine: EngineLike, request_id: str) -> Iterator[None]:
    """Meanwhile the engine works on `request_id` for a request, which may be aborted by that id or by its own."""
    active: ActiveRequest | None = request.scope.get(ACTIVE_REQUEST)
    if active is None:
        yield
        return
    active.work, active.request_id = PooledWork(engine, request_id), request.scope.get(REQUEST_ID)
    try:
        yield
    finally:
        active.work = None
