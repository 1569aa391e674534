"""Which requests are being answered right now, by the ids under which a client may know them."""

from __future__ import annotations

from collections import defaultdict

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aengine.http.door.request_id import request_id_of
from aengine.http.engine_like import StreamLike


class RunningReplies:
    """Streams under their own id and under their `X-Request-Id`, which several may share."""

    def __init__(self) -> None:
        self._streams: defaultdict[str, list[StreamLike]] = defaultdict(list)

    def abort(self, request_id: str) -> int:
        """End the requests of that id, each with finish_reason "abort"; returns how many there were."""
        streams = list(self._streams.get(request_id, ()))
        for stream in streams:
            stream.abort()
        return len(streams)

    def add(self, request_id: str, stream: StreamLike) -> None:
        self._streams[request_id].append(stream)

    def remove(self, request_id: str, stream: StreamLike) -> None:
        streams = self._streams[request_id]
        streams.remove(stream)
        if not streams:
            del self._streams[request_id]


class ListedReply(Response):
    """A reply that can be aborted by its ids for as long as it lasts."""

    def __init__(self, reply: Response, stream: StreamLike, running: RunningReplies) -> None:
        self.background = None
        self._reply = reply
        self._stream = stream
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ids = {self._stream.id, request_id_of(scope)}
        for one in ids:
            self._running.add(one, self._stream)
        try:
            await self._reply(scope, receive, send)
        finally:
            for one in ids:
                self._running.remove(one, self._stream)
