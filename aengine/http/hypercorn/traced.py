"""Records a span on the timeline for each ASGI message that is sent."""

from __future__ import annotations

import heapq
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.http.entry.context import context_of
from aengine.timeline import SENDS, Timeline


class TracedSends:
    """Middleware that records the sends of `app`. Overlapping sends get separate tracks."""

    def __init__(self, app: ASGIApp, timeline: Timeline) -> None:
        self._app = app
        self._timeline = timeline
        self._free = [SENDS]  # tracks, a heap
        self._tracks = SENDS + 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def traced(message: Message) -> None:
            if self._free:
                track = heapq.heappop(self._free)
            else:
                track, self._tracks = self._tracks, self._tracks + 1
            begin = time.perf_counter()
            try:
                await send(message)
            finally:
                name = str(message["type"]).removeprefix("http.response.")
                counts = {"bytes": len(message.get("body", b""))}
                self._timeline.span(track, name, begin, time.perf_counter(), counts)
                heapq.heappush(self._free, track)

        context_of(scope).send_piece = traced
        await self._app(scope, receive, traced)
