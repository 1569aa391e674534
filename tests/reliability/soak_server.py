"""`python -m tests.reliability.soak_server`: a server that measures itself once a second and prints the result.

The first line is the port, every other line a `Sample`. It ends when its input closes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import msgspec

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from tests.http.demo_server import DemoEngine
from tests.http.serving import hosting

PAGE = os.sysconf("SC_PAGE_SIZE")
POOL = {
    "torch_threads": 1,
    "page_size": 4,
    "num_pages": 260,
    "max_num_seqs": 32,
    "max_queue": 48,
    "max_model_len": 1024,
}


class Sample(msgspec.Struct, frozen=True):
    """What the server was at one moment."""

    at: float  # seconds since it was ready
    rss: int  # bytes
    blocks: int  # that Python's allocator has given out
    heap: int  # bytes that malloc has given out
    tasks: dict[str, int]  # by the coroutine that they run
    running: int
    waiting: int
    requests: int  # that the engine has ended
    preemptions: int
    fault: str | None  # what the integrity check said


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def heap_in_use() -> int:
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = Mallinfo
    info = tell()
    return int(info.uordblks + info.hblkhd)


def look(engine: DemoEngine, began: float) -> Sample:
    fault = None
    try:
        engine.check_integrity()
    except AssertionError as error:
        fault = str(error)
    stats = engine.stats()
    names = (getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    return Sample(
        at=time.monotonic() - began,
        rss=int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        blocks=sys.getallocatedblocks(),
        heap=heap_in_use(),
        tasks=dict(Counter(names)),
        running=stats.running,
        waiting=stats.waiting,
        requests=stats.requests,
        preemptions=stats.preemptions,
        fault=fault,
    )


async def main() -> None:
    engine = DemoEngine(**POOL, progress=False)
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, over.set)
    async with hosting(app) as (port, _):
        await engine.entered.wait()
        print(port, flush=True)
        began = time.monotonic()
        while not over.is_set():
            if not engine.stats().running:  # so that a quiet moment shows kept memory, not garbage
                gc.collect()
            print(msgspec.json.encode(look(engine, began)).decode(), flush=True)
            try:
                async with asyncio.timeout(1):
                    await over.wait()
            except TimeoutError:
                continue


if __name__ == "__main__":
    asyncio.run(main())
