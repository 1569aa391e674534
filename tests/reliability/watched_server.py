"""A process that serves the demo model and measures how long its event loop is held. `GET /worst` returns and resets
it.

`python -m tests.reliability.watched_server [CHECKPOINT]` prints its port and serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from tests.http.demo_server import DemoEngine
from tests.http.serving import hosting

TICK = 0.001  # seconds; a measured hold is too short by at most this


class Watched:
    """The server with the extra path `/worst`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.worst = {"wall": 0.0, "cpu": 0.0}
        self.stop = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/worst":
            await self._app(scope, receive, send)
            return
        await asyncio.sleep(2 * TICK)
        body = json.dumps(self.worst).encode()
        self.worst = {"wall": 0.0, "cpu": 0.0}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def watch(self) -> None:
        while not self.stop.is_set():
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(TICK)
            self.worst["wall"] = max(self.worst["wall"], time.monotonic() - wall - TICK)
            self.worst["cpu"] = max(self.worst["cpu"], time.thread_time() - cpu)


async def main(model: str | None) -> None:
    engine = DemoEngine(model=model, max_num_seqs=128)
    config = ServerConfig(served_model_name="demo")
    watched = Watched(create_app(EngineConfig(), config, engine_factory=lambda given: engine))
    async with hosting(watched) as (port, _), asyncio.TaskGroup() as tasks:
        await engine.entered.wait()
        tasks.create_task(watched.watch())
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        watched.stop.set()


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:] or [None])))
