"""A process that requests one path over and over on one connection, and measures each answer.

`python -m tests.reliability.prober PORT PATH` runs until its standard input closes. Then it prints a JSON list of [time
of the request, seconds, status]. It is a separate process, so that the test's own work does not count as delay.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

PAUSE = 0.005  # seconds between two questions


class Probe(NamedTuple):
    asked: float  # time.monotonic(), which all processes share
    seconds: float
    status: int


def main(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    probes: list[Probe] = []
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        asked = time.monotonic()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        probes.append(Probe(asked, time.monotonic() - asked, answer.status))
        if len(probes) == 1:
            print("asking", flush=True)
    print(json.dumps(probes), flush=True)


@asynccontextmanager
async def probing(port: int, path: str = "/health") -> AsyncIterator[list[Probe]]:
    """The list is filled when the block is left."""
    probes: list[Probe] = []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.reliability.prober", str(port), path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"asking\n"
        yield probes
        process.stdin.close()
        probes += [Probe(*values) for values in json.loads(await process.stdout.readline())]
    finally:
        process.stdin.close()
        await process.wait()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
