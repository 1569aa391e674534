"""Times whole decode steps of a few streams in the engine, and compares them with the bytes that a step must read."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence

import torch

import aengine
from aengine.model.config import ModelConfig
from bench.results import Report
from bench.shapes import ids
from bench.step_bytes import step_bytes

READ = 4.54e12  # bytes per second that an H200 reads at most
PROMPT, TOKENS = 128, 512


async def step_seconds(engine: aengine.Engine, streams: int, run: int, temperature: float, tokens: int) -> float:
    """Return the time of a step while all streams decode.

    That is from the first token of the last stream until the first stream has all its tokens.
    """
    rng = random.Random(1000 * run + streams)
    marks: list[tuple[float, int]] = []
    begun = 0

    def mark() -> None:
        marks.append((time.perf_counter(), engine.stats().steps))

    async def follow(prompt: list[int]) -> None:
        nonlocal begun
        own = False
        async for _ in engine.generate(prompt, max_tokens=tokens, temperature=temperature, ignore_eos=True):
            if not own:
                own, begun = True, begun + 1
                if begun == streams:
                    mark()
        mark()

    await asyncio.gather(*(follow(ids(rng, PROMPT)) for _ in range(streams)))
    (began, first), (ended, last) = marks[:2]
    return (ended - began) / (last - first)


async def tell_steps(
    engine: aengine.Engine,
    config: ModelConfig,
    case: dict[str, str],
    report: Report,
    *,
    streams: Sequence[int],
    runs: int,
    temperature: float,
    kv_dtype: torch.dtype = torch.bfloat16,
    tokens: int = TOKENS,
) -> None:
    """A result for each number of streams: the median step, and what reading its bytes alone would take."""
    dtype = getattr(torch, config.dtype)
    for count in streams:
        times = [1e3 * await step_seconds(engine, count, run, temperature, tokens) for run in range(runs + 1)][1:]
        engine.flush_cache()
        step = statistics.median(times)
        size = step_bytes(config, count, PROMPT + tokens // 2, dtype, kv_dtype)
        limit = 1e3 * size / READ
        report.tell(
            {**case, "streams": count},
            {"tok_s": 1e3 * count / step, "step_ms": step, "of_limit": limit / step},
            runs={"step_ms": times},
            reference={"limit_tok_s": 1e3 * count / limit, "limit_ms": limit, "step_gb": size / 1e9},
        )
