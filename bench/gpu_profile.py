"""Profiles decode steps on the GPU: how busy it is, and the time of each kernel.

    python bench/gpu_profile.py [--shape 8b] [--quantization fp8] [--kv-cache-dtype fp8]
                                [--batch 1 64 256] [--context 512] [--constrained 32] [--temperature 0.6]
                                [--proposer eagle3 --drafts 4]

With --constrained, the given number of rows follows a JSON schema, with a tokenizer of full size. With --proposer,
steps verify drafts, whose acceptance is pinned as `bench/speculation.py` does it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine import SamplingParams, Structured
from bench.results import Report
from bench.shapes import QUANTIZATIONS, SHAPES, ids
from bench.speculation import CURVES, SETTLED, pinned, write_eagle3, write_target
from bench.startup import write_tokenizer

STEPS = 40
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 30}, "minItems": 1000}


async def steady(engine: aengine.Engine, batch: int, options: argparse.Namespace, report: Report) -> None:
    """Profile a stretch of steps in which `batch` rows decode and nothing else happens."""
    rng = random.Random(batch)
    sampling = SamplingParams(max_tokens=2000, temperature=options.temperature, ignore_eos=True)
    following = SamplingParams(max_tokens=2000, temperature=options.temperature, structured=Structured(json=SCHEMA))
    streams = [
        await engine.submit(ids(rng, options.context), following if number < options.constrained else sampling)
        for number in range(batch)
    ]

    async def consume(stream: aengine.engine.Stream) -> None:
        while await stream.take():
            pass

    async def until(step: int) -> None:
        while engine.stats().steps < step:
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(consume(stream))
        while engine.stats().generated_tokens == 0 or engine.stats().waiting:
            await asyncio.sleep(0.01)
        settled = engine.stats().steps + (60 if options.proposer == "off" else SETTLED)
        await until(settled)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            begun, generated = engine.stats().steps, engine.stats().generated_tokens
            await until(begun + STEPS)
            torch.cuda.synchronize()
            steps = engine.stats().steps - begun
            generated = engine.stats().generated_tokens - generated
        for stream in streams:
            stream.abort()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    # The edges of the stretch belong to the profiler; look at its middle.
    low = spans[len(spans) // 10][0]
    high = spans[-len(spans) // 10][0]
    busy, reach = 0.0, low
    by_name: Counter[str] = Counter()
    for start, end, name in spans:
        if low <= start and end <= high:
            busy += max(0.0, end - max(start, reach))
            reach = max(reach, end)
            by_name[name[:70]] += int((end - start) * 1000)
    step_us = (high - low) / (steps * 0.8)
    shape = " ".join(filter(None, (options.shape, options.quantization)))
    kernels = {
        name: f"{total / 1000 / (steps * 0.8):.1f} us ({total / 1000 / (high - low):.1%})"
        for name, total in by_name.most_common(14)
    }
    report.tell(
        {"shape": shape, "kv": options.kv_cache_dtype, "batch": batch, "context": options.context}
        | {"constrained": options.constrained, "proposer": options.proposer},
        {"step_us": step_us, "busy": busy / (high - low), "tokens": generated / steps / batch},
        detail={"kernels": kernels},
    )


async def measure(options: argparse.Namespace, report: Report) -> None:
    proposer = options.proposer
    with tempfile.TemporaryDirectory() as scratch, pinned(CURVES.get(proposer, [])):
        write_target(Path(scratch), options.shape, options.quantization, proposer)
        knobs = {"speculation": write_eagle3(Path(scratch)) if proposer == "eagle3" else proposer}
        if options.constrained:
            write_tokenizer(Path(scratch))
        async with aengine.Engine(
            scratch, load_format="dummy", device="cuda", progress=False, kv_cache_dtype=options.kv_cache_dtype,
            draft_tokens=options.drafts, **knobs,
        ) as engine:  # fmt: skip
            for batch in options.batch:
                await steady(engine, batch, options, report)
                while engine.stats().running:
                    await asyncio.sleep(0.01)
                engine.flush_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--quantization", choices=list(QUANTIZATIONS), help="how the checkpoint keeps its weights")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--constrained", type=int, default=0, help="rows with a grammar")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--proposer", default="off", choices=["off", *sorted(CURVES)])
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("gpu_profile", options.out)
    asyncio.run(measure(options, report))
    report.print_table()
    for result in report.results:
        print(f"\nbatch {result.case['batch']}, per step:")
        print("\n".join(f"{share:>24}  {name}" for name, share in result.detail["kernels"].items()))


if __name__ == "__main__":
    main()
