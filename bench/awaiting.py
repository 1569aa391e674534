"""Compares ways to await a CUDA event on an event loop. Each replaces the engine's own on the same running engine.

    python bench/awaiting.py [--shape 0.6b 8b] [--batch 1 64] [--way ...] [--runs 3]

A batch of streams decodes. Meanwhile a task sleeps for 1 ms over and over and measures how late it wakes, like any
other task of the loop. Process time counts every thread. Prints JSON lines and a table: medians of the runs, "worst"
over all runs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.model.config import ModelConfig
from aengine.runtime.cuda.clock import DeviceClock
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from bench.results import Report
from bench.shapes import SHAPES, ids, write_config

PROMPT_TOKENS = 128
SETTLE_STEPS = 50  # until every stream decodes
STEPS = 300
TICK_SECONDS = 0.001


class Clock(Protocol):
    """What the runner needs."""

    def watch(self, event: torch.cuda.Event) -> Awaitable[None]: ...

    def close(self) -> None: ...


class BusyPoll:
    """Asks the event in every pass of the loop, as `while not event.query(): await asyncio.sleep(0)` does."""

    def __init__(self, device: torch.device) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[torch.cuda.Event, asyncio.Future[None]]] = deque()

    def watch(self, event: torch.cuda.Event) -> Awaitable[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._pending.append((event, future))
        if len(self._pending) == 1:
            self._begin()
        return future

    def _begin(self) -> None:
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._ask()
        if self._pending:
            self._loop.call_soon(self._turn)

    def _ask(self) -> None:
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()[1].set_result(None)

    def close(self) -> None:
        """Nothing is held."""


class TimerPoll(BusyPoll):
    """Asks the event each time a timer of the kernel fires: the loop's own timers know whole milliseconds only."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        super().__init__(device)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._nanoseconds = int(seconds * 1e9)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._timer, self._turn)

    def _begin(self) -> None:
        self._set(self._nanoseconds)

    def _turn(self) -> None:
        os.read(self._timer, 8)
        self._ask()
        if not self._pending:
            self._set(0)

    def _set(self, nanoseconds: int) -> None:
        spec = (ctypes.c_long * 4)(0, nanoseconds, 0, nanoseconds)  # how often, and how soon; 0: off
        self._libc.timerfd_settime(self._timer, 0, ctypes.byref(spec), None)

    def close(self) -> None:
        self._loop.remove_reader(self._timer)
        os.close(self._timer)


class InThread:
    """Waits in a worker thread, which spins inside the driver unless the event is one that blocks."""

    def __init__(self, device: torch.device, blocking: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1)
        self._side = torch.cuda.Stream(device) if blocking else None

    def watch(self, event: torch.cuda.Event) -> Awaitable[None]:
        if self._side is not None:
            self._side.wait_event(event)
            event = torch.cuda.Event(blocking=True)
            event.record(self._side)
        return self._loop.run_in_executor(self._worker, event.synchronize)

    def close(self) -> None:
        self._worker.shutdown()


class OnLoop(BusyPoll):
    """Stops the loop until the event has happened; then everybody else gets one turn."""

    async def watch(self, event: torch.cuda.Event) -> None:
        event.synchronize()  # runs when the step is awaited, not when it is launched
        await asyncio.sleep(0)


WAYS: dict[str, Callable[[torch.device], Clock]] = {
    "host function, side stream, fflush": DeviceClock,
    "busy poll": BusyPoll,
    "poll every 0.5 ms": lambda device: TimerPoll(device, 0.0005),
    "poll every 1 ms": lambda device: TimerPoll(device, 0.001),
    "synchronize in a thread": lambda device: InThread(device, blocking=False),
    "synchronize in a thread, blocking event": lambda device: InThread(device, blocking=True),
    "synchronize on the loop": OnLoop,
}


class Stamped:
    """Notes the wall time and the process time of every step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.close = clock.close
        self.steps: list[tuple[float, float]] = []

    def watch(self, event: torch.cuda.Event) -> Awaitable[None]:
        self.steps.append((time.perf_counter(), time.process_time()))
        return self._clock.watch(event)


async def tick(late: list[tuple[float, float]]) -> None:
    """(when, seconds late), for ever."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        woken = time.perf_counter()
        late.append((woken, woken - began - TICK_SECONDS))


def lateness(late: list[tuple[float, float]], begin: float, end: float) -> dict[str, float]:
    inside = sorted(seconds for when, seconds in late if begin <= when <= end) or [end - begin]  # it never woke
    return {"late_p99_ms": 1e3 * inside[int(0.99 * (len(inside) - 1))], "late_worst_ms": 1e3 * inside[-1]}


async def measure(engine: aengine.Engine, clock: Stamped, batch: int, run: int) -> dict[str, float]:
    """Seconds per step and what else happened from the first step that carries all streams to the end of the first."""
    rng = random.Random(run)
    finished: list[float] = []
    late: list[tuple[float, float]] = []

    async def one() -> None:
        tokens = SETTLE_STEPS + STEPS
        await engine.complete(ids(rng, PROMPT_TOKENS), max_tokens=tokens, temperature=0.6, ignore_eos=True)
        finished.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        ticker = group.create_task(tick(late))
        await asyncio.gather(*(one() for _ in range(batch)))
        ticker.cancel()
    steps = [step for step in clock.steps[SETTLE_STEPS:] if step[0] < finished[0]]
    (begin, cpu_begin), (end, cpu_end) = steps[0], steps[-1]
    seconds = (end - begin) / (len(steps) - 1)
    return {
        "steps": len(steps),
        "tokens_per_s": batch / seconds,
        "step_us": 1e6 * seconds,
        "cpu_us_per_step": 1e6 * (cpu_end - cpu_begin) / (len(steps) - 1),
        **lateness(late, begin, end),
    }


def combined(runs: list[dict[str, float]]) -> dict[str, float]:
    worst = {"late_worst_ms": max(run["late_worst_ms"] for run in runs)}
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} | worst


async def measure_shape(shape: str, options: argparse.Namespace, report: Report) -> None:
    started: list[Runtime] = []

    def start(
        config: aengine.EngineConfig, folder: Path, model: ModelConfig, wait_for_text: Callable[[], object]
    ) -> Runtime:
        started.append(start_runtime(config, folder, model, wait_for_text))
        return started[0]

    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_config(Path(scratch), shape)
        knobs: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": max(options.batch), "kv_cache_gib": 8.0}
        async with aengine.Engine(scratch, device=options.device, start=start, progress=False, **knobs) as engine:
            runner: Any = started.pop().runner
            if not hasattr(runner, "_clock"):
                raise SystemExit("the runner keeps its clock elsewhere now: change this script")
            for run in range(options.runs + 1):
                for batch in options.batch:
                    for way in options.way:
                        clock = Stamped(WAYS[way](torch.device(options.device)))
                        runner._clock = clock
                        figures = await measure(engine, clock, batch, run)
                        while engine.stats().running:
                            await asyncio.sleep(0.01)
                        await asyncio.sleep(0.05)  # the last step's bookkeeping
                        clock.close()
                        runner._clock = None
                        engine.flush_cache()
                        if run:  # the first one warms up
                            found.setdefault((batch, way), []).append(figures)
    for (batch, way), runs in found.items():
        best = min(combined(others)["step_us"] for (size, _), others in found.items() if size == batch)
        figures = combined(runs)
        report.tell(
            {"shape": shape, "batch": batch, "way": way},
            {**figures, "step_us_beside_the_best": figures["step_us"] - best},
            runs={key: [one[key] for one in runs] for key in figures},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.6b", "8b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("awaiting", options.out)
    for shape in options.shape:
        asyncio.run(measure_shape(shape, options, report))
        gc.collect()
        torch.cuda.empty_cache()
    report.print_table()


if __name__ == "__main__":
    main()
