"""Hundreds of streams whose readers leave at chosen moments: their memory is freed, and others are unaffected."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.runner import CpuStep, Runner
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.scheduling.sequence import Phase, Sequence
from aengine.step_plan import StepPlan, StepResult
from tests.engine.conftest import idle
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.serving import parse_events, raw_request

pytestmark = pytest.mark.anyio

MOMENTS = ["queued", "half read", "before its first token", "decoding", "in its last step", "being preempted"]
WAVES, SURVIVORS = 6, 3
KNOBS = {"max_num_seqs": 8, "num_pages": 80, "page_size": 4, "max_model_len": 256, "max_step_tokens": 32}
VICTIM = 3000  # token ids from here on name the victim
STEP_SECONDS, LONGEST_STEP = 0.003, 0.2  # long enough to notice a disconnect; the second for a busy machine


def moment(sequence: Sequence) -> str:
    """Where in its life a sequence is, right after a launch."""
    match sequence.phase:
        case Phase.WAITING:
            return "queued"
        case Phase.PREEMPTED:
            return "being preempted"
        case Phase.FINISHED:
            return "over"
    if not sequence.decoding:
        return "half read"
    if not sequence.output:
        return "before its first token"
    return "in its last step" if len(sequence.output) + sequence.pending >= sequence.max_output else "decoding"


class Watching:
    """A runner that slows down while a request is marked, and calls back for each step in flight."""

    def __init__(self, inner: Runner, shooting: Range) -> None:
        self._inner = inner
        self._range = shooting

    def launch(self, plan: StepPlan) -> CpuStep:
        step = self._inner.launch(plan)
        if not self._range.marked:
            return step  # type: ignore[return-value]
        asyncio.get_running_loop().call_soon(self._range.look)
        return SlowStep(plan, step._future, self._range)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._inner.close()


class SlowStep(CpuStep):
    def __init__(self, plan: StepPlan, future: Any, shooting: Range) -> None:
        super().__init__(plan, future)
        self._range = shooting

    async def result(self) -> StepResult:
        result = await super().result()
        longest = time.monotonic() + LONGEST_STEP
        await asyncio.sleep(STEP_SECONDS)
        while self._range.unnoticed and time.monotonic() < longest:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(STEP_SECONDS)
        self._range.unnoticed = 0
        return result


class Range:
    """An engine whose requests can be shot at."""

    def __init__(self) -> None:
        self.engine = DemoEngine(**KNOBS, torch_threads=1, start=self._start)
        self.marked: dict[int, tuple[str, Callable[[], None]]] = {}  # victim -> when, and what ends its reader
        self.hit: Counter[str] = Counter()  # the phases in which requests were aborted
        self.living = 0  # aborted but not ended
        self.unnoticed = 0  # disconnected in the step in flight, and not aborted yet

    def _start(
        self, config: EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]
    ) -> Runtime:
        runtime = start_runtime(config, folder, model, begin_text)
        return Runtime(Watching(runtime.runner, self), runtime.model, runtime.pool, runtime.max_step_tokens)

    def watch(self) -> None:
        scheduler = self.engine._ready().scheduler
        abort = scheduler.abort

        def noted(sequence: Sequence) -> None:
            self.unnoticed = max(0, self.unnoticed - 1)
            if sequence.phase is not Phase.FINISHED:
                self.hit[moment(sequence)] += 1
            abort(sequence)
            self.living += sequence.phase is not Phase.FINISHED

        scheduler.abort = noted  # type: ignore[method-assign]

    def look(self) -> None:
        for request in list(self.engine._service.requests._live.values()):
            sequence = request.choices[0].sequence
            number = sequence.prompt[0] - VICTIM
            when, shoot = self.marked.get(number, ("", lambda: None))
            if when == moment(sequence) or (when and len(sequence.output) > 60):
                del self.marked[number]
                self.unnoticed += 1
                shoot()


def prompt(rng: random.Random, when: str) -> list[int]:
    return [rng.randint(300, 2900) for _ in range(rng.randint(100, 180) if when == "half read" else rng.randint(4, 24))]


def survivor(number: int) -> dict[str, Any]:
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
    return {"input_ids": [300 + number, 301, 302], "max_tokens": 40, "ignore_eos": True, **sampling}


async def told(port: int, body: dict[str, Any]) -> list[int]:
    """The ids of a stream that is read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request("/generate", body).replace(b"Host:", b"Connection: close\r\nHost:"))
    text = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    events = "".join(line + "\n\n" for line in text.decode().splitlines() if line.startswith("data: "))
    return [token for event in parse_events(events)[:-1] for token in event["token_ids"]]


async def doomed(port: int, body: dict[str, Any]) -> socket.socket:
    raw = socket.socket()
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    await loop.sock_sendall(raw, raw_request("/generate", body))
    return raw


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@asynccontextmanager
async def running(survivors: int) -> AsyncIterator[tuple[Range, int, list[list[int]]]]:
    """The range, its port, and what the survivors say when they are alone."""
    shooting = Range()
    async with hosted_demo(shooting.engine) as url:
        port = int(url.rpartition(":")[2])
        alone = [await told(port, survivor(number)) for number in range(survivors)]
        assert all(len(ids) == 40 for ids in alone)
        shooting.watch()
        yield shooting, port, alone


async def gone(shooting: Range) -> None:
    """Every marked request is disconnected, and the memory is free soon after the last one."""
    async with asyncio.timeout(60):
        while shooting.marked:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)
    with anyio.fail_after(10):
        await idle(shooting.engine)
    assert shooting.engine.stats().pages_used == 0
    assert shooting.living == 0


def checked(hit: Counter[str], victims: int) -> None:
    print(dict(hit))
    assert sum(hit.values()) >= 0.95 * victims  # the others had said their last when it came to them
    assert min(hit[name] for name in MOMENTS) >= 0.02 * victims


@pytest.mark.slow
async def test_connections_that_break_at_any_moment() -> None:
    """Half with FIN, half with RST."""
    victims = 252
    rng = random.Random(2)
    async with running(WAVES * SURVIVORS) as (shooting, port, alone):
        for wave in range(WAVES):
            for number in range(wave * victims // WAVES, (wave + 1) * victims // WAVES):
                when = MOMENTS[number % len(MOMENTS)]
                body = {"input_ids": [VICTIM + number, *prompt(rng, when)], "ignore_eos": True}
                raw = await doomed(port, body | {"max_tokens": 5 if when == "in its last step" else 70})
                end = reset if rng.random() < 0.5 else socket.socket.close
                shooting.marked[number] = when, lambda raw=raw, end=end: end(raw)  # type: ignore[misc]
            numbers = range(wave * SURVIVORS, (wave + 1) * SURVIVORS)
            together = await asyncio.gather(*(told(port, survivor(number)) for number in numbers))
            assert together == [alone[number] for number in numbers]
            await gone(shooting)
    checked(shooting.hit, victims)


@pytest.mark.slow
async def test_consumers_that_are_cancelled_at_any_moment() -> None:
    victims = 120
    rng = random.Random(3)
    async with running(SURVIVORS) as (shooting, _, alone), asyncio.TaskGroup() as tasks:

        async def read(body: dict[str, Any]) -> list[int]:
            ids = body.pop("input_ids")
            return [token async for one in shooting.engine.generate(ids, **body) for token in one.token_ids]

        for number in range(victims):
            when = MOMENTS[number % len(MOMENTS)]
            body = {"input_ids": [VICTIM + number, *prompt(rng, when)], "ignore_eos": True}
            body["max_tokens"] = 5 if when == "in its last step" else 70
            shooting.marked[number] = when, tasks.create_task(read(body)).cancel
        together = await asyncio.gather(*(read(survivor(number)) for number in range(SURVIVORS)))
        assert together == alone
        await gone(shooting)
    checked(shooting.hit, victims)
