"""Which requests are being answered right now, by the ids under which a client may know them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def listed(self, stream: StreamLike, request_id: str) -> Iterator[None]:
        """The stream can be aborted under its own id and this one meanwhile."""
        ids = {stream.id, request_id}
        for one in ids:
            self._streams[one].append(stream)
        try:
            yield
        finally:
            for one in ids:
                self._streams[one].remove(stream)
                if not self._streams[one]:
                    del self._streams[one]
