"""What the engine itself costs per token: schedule, commit, detokenize, deliver, yield. The model takes no time.

    python bench/overhead.py [--batch 1 64 256] [--tokens 512] [--out results.jsonl]

Microseconds of process time per generated token, median of the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.sizing.pool import PoolSize
from aengine.step_plan import StepPlan, StepResult
from aengine.timeline import Timeline
from bench.results import Report

TARGET_US = 15.0  # at batch 256


class NullStep:
    """A step that is over at once."""

    def __init__(self, plan: StepPlan, result: StepResult) -> None:
        self.plan = plan
        self._result = result

    async def result(self) -> StepResult:
        await asyncio.sleep(0)  # as an event that has already fired: the loop turns once
        return self._result


class NullRunner:
    """Draws the same tokens for every row, without a model."""

    def launch(self, plan: StepPlan) -> NullStep:
        draws = len(plan.sampled_rows)
        return NullStep(plan, StepResult([100 + plan.step % 1000] * draws, [True] * draws, None))

    def trace(self, timeline: Timeline) -> None:
        """There is no device to be busy."""

    def close(self) -> None:
        """Nothing is held."""


def null_runtime(
    config: EngineConfig, folder: Path, model: ModelConfig, wait_for_text: Callable[[], object]
) -> Runtime:
    """The demo model's shape, no weights."""
    pool = PoolSize(num_pages=65536, page_bytes=1, max_model_len=2048)
    return Runtime(NullRunner(), model, pool, 8192)


async def run(batch: int, tokens: int) -> float:
    """Microseconds of process time per token."""
    async with aengine.Engine(start=null_runtime, max_num_seqs=max(batch, 1), prefix_cache=True) as engine:

        async def one(number: int) -> None:
            prompt = [200 + (number * 7 + place) % 1000 for place in range(32)]
            async for _ in engine.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
                pass

        await one(batch)  # warm up
        began = time.process_time()
        await asyncio.gather(*(one(number) for number in range(batch)))
        return (time.process_time() - began) / (batch * tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("overhead", options.out)
    for batch in options.batch:
        runs = [asyncio.run(run(batch, options.tokens)) for _ in range(options.runs)]
        report.tell(
            {"batch": batch, "tokens": options.tokens},
            {"us_per_token": statistics.median(runs), "least": min(runs), "most": max(runs)},
            runs={"us_per_token": runs},
            reference={"target": TARGET_US if batch >= 256 else None},
        )
    report.print_table()


if __name__ == "__main__":
    main()
