"""Requests for embeddings and scores as `/abort` finds them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from starlette.requests import Request

from aengine.http.engine_like import EngineLike
from aengine.http.hypercorn.in_flight import at_work


@dataclass(frozen=True, slots=True)
class PooledWork:
    """The prompts of one request."""

    engine: EngineLike
    id: str

    def abort(self) -> bool:
        """End them; False: they are still being tokenized, or done."""
        return self.engine.abort(self.id)


def abortable(request: Request, engine: EngineLike, request_id: str) -> AbstractContextManager[None]:
    """Meanwhile the engine works on `request_id` for a request, which may be aborted by that id or by its own."""
    return at_work(request.scope, PooledWork(engine, request_id))
