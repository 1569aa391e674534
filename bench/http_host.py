"""The host's cost of event streams: the HTTP server over a simulated device.

    python bench/http_host.py [--step-ms 7.8] [--clients 256] [--input 512] [--output 512] [--runs 2]

A step of all clients' rows takes the simulated device `--step-ms`. It begins the next step at once if that has been
launched by then. The time without a step (`idle`) is what a real device would lose. Another process reads the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypercorn.asyncio import serve
from hypercorn.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.step_plan import StepPlan, StepResult
from aengine.timeline import Timeline
from bench.overhead import null_runtime
from bench.results import Report
from bench.shapes import write_config
from bench.startup import write_tokenizer

PORT = 8190
PREFILL = 78_000.0  # tokens per second
LONGEST_PAUSE = 0.2  # seconds; a longer pause means that there were no requests


class Step:
    """A step that is over at its time."""

    def __init__(self, plan: StepPlan, result: StepResult, end: float) -> None:
        self.plan = plan
        self._result = result
        self._end = end

    async def result(self) -> StepResult:
        await asyncio.sleep(max(0.0, self._end - time.perf_counter()))
        return self._result


class PretendedDevice:
    """A runner whose steps follow each other, and draw other tokens for each row."""

    def __init__(self, step: float, rows: int) -> None:
        """step: seconds that one of `rows` rows takes; one of few takes half of that."""
        self._step = step
        self._rows = rows
        self._free = 0.0  # from when on
        self.busy, self.idle = 0.0, 0.0

    def launch(self, plan: StepPlan) -> Step:
        now, draws = time.perf_counter(), len(plan.sampled_rows)
        decode = self._step * (1 + len(plan.decode) / self._rows) / 2
        took = max(decode, (plan.num_tokens - len(plan.decode)) / PREFILL)
        pause = now - self._free
        self.idle += pause if 0 < pause < LONGEST_PAUSE else 0.0
        self._free = max(now, self._free) + took
        self.busy += took
        tokens = [300 + (plan.step * 7919 + row * 31) % 100_000 for row in range(draws)]
        return Step(plan, StepResult(tokens, [True] * draws, None), self._free)

    def trace(self, timeline: Timeline) -> None:
        """There is no device to be busy."""

    def close(self) -> None:
        """Nothing is held."""


async def load(options: argparse.Namespace, seed: int) -> None:
    """All clients once."""
    arguments = ["--url", f"http://127.0.0.1:{PORT}", "--engine", "aengine", "--vocab", "150000"]
    arguments += ["--workload", f"random-{options.input}-{options.output}", "--seed", str(seed)]
    arguments += ["--concurrency", str(options.clients), "--requests", str(options.clients)]
    script = Path(__file__).with_name("serve.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), *arguments, stdout=asyncio.subprocess.DEVNULL
    )
    if await process.wait():
        raise SystemExit("the load generator failed")


async def measure(options: argparse.Namespace, report: Report) -> None:
    device = PretendedDevice(options.step_ms / 1e3, options.clients)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "8b")
        write_tokenizer(Path(folder))

        def start(config: EngineConfig, folder: Path, model: ModelConfig, wait: Callable[[], object]) -> Runtime:
            return replace(null_runtime(config, folder, model, wait), runner=device)

        def engine(config: EngineConfig) -> aengine.Engine:
            return aengine.Engine(config=config, start=start)

        config = EngineConfig(model=folder, max_num_seqs=options.clients, progress=False)
        app, stop = create_app(config, ServerConfig(), engine), asyncio.Event()
        hypercorn = Config()
        hypercorn.bind = [f"127.0.0.1:{PORT}"]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(app, hypercorn, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
            await app.settled.wait()
            if app.failure is not None:
                raise app.failure
            us, idle = list[float](), list[float]()
            for run in range(options.runs):
                cpu, busy, paused = time.process_time(), device.busy, device.idle
                await load(options, run)
                us.append((time.process_time() - cpu) / (options.clients * options.output) * 1e6)
                idle.append((device.idle - paused) / (device.idle - paused + device.busy - busy))
            stop.set()
    report.tell(
        {"clients": options.clients, "step_ms": options.step_ms, "tokens": options.output},
        {"us_per_token": statistics.median(us), "idle": statistics.median(idle)},
        runs={"us_per_token": us, "idle": idle},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=7.8, help="of as many rows as there are clients")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("http_host", options.out)
    asyncio.run(measure(options, report))
    report.print_table()


if __name__ == "__main__":
    main()
