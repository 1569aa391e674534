"""What the prefix cache saves: the same work with and without it, in turns.

    python bench/prefix.py [--device cuda --shape 8b] [--runs 6]

chat: conversations of five turns (system prompt 120 tokens, turns of 24, answers of 40). Each prompt is the whole
conversation so far. Several conversations at once share the system prompt. shared: prompts that share a long beginning,
all at once, after one request that cached it. unique: prompts that share nothing, which shows the cost of the lookup.
The hit rate is of all prompt tokens, and time saved is of the whole wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from bench.results import Report
from bench.shapes import SHAPES, SMALL, write_config

FIRST_ID, LAST_ID = 300, 4000


@dataclass
class Seen:
    """The measurements of one run of a workload."""

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)  # seconds to the first token, per request
    prompt_tokens: int = 0
    cached_tokens: int = 0


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


async def ask(engine: aengine.Engine, prompt: list[int], tokens: int, seen: Seen) -> list[int]:
    """The answer's ids."""
    began, answer = time.perf_counter(), list[int]()
    async for fragment in engine.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
        if not answer:
            seen.first.append(time.perf_counter() - began)
        answer.extend(fragment.token_ids)
        if fragment.usage is not None:
            seen.prompt_tokens += fragment.usage.prompt_tokens
            seen.cached_tokens += fragment.usage.cached_tokens
    return answer


async def converse(engine: aengine.Engine, rng: random.Random, system: list[int], seen: Seen) -> None:
    history = system
    for _ in range(5):
        history = history + ids(rng, 24)
        history += await ask(engine, history, 40, seen)


async def chat(engine: aengine.Engine, seed: int, seen: Seen, options: argparse.Namespace) -> None:
    system = ids(random.Random(seed), 120)
    talks = [converse(engine, random.Random(f"{seed} {n}"), system, seen) for n in range(options.conversations)]
    await asyncio.gather(*talks)


async def one_chat(engine: aengine.Engine, seed: int, seen: Seen, options: argparse.Namespace) -> None:
    rng = random.Random(seed)
    await converse(engine, rng, ids(rng, 120), seen)


async def shared(engine: aengine.Engine, seed: int, seen: Seen, options: argparse.Namespace) -> None:
    rng = random.Random(seed)
    beginning = ids(rng, options.shared)
    await ask(engine, beginning + ids(rng, 32), 1, seen)
    await asyncio.gather(*(ask(engine, beginning + ids(rng, 32), 16, seen) for _ in range(options.prompts)))


async def unique(engine: aengine.Engine, seed: int, seen: Seen, options: argparse.Namespace) -> None:
    rng = random.Random(seed)
    await asyncio.gather(*(ask(engine, ids(rng, options.shared), 16, seen) for _ in range(options.prompts)))


Workload = Callable[[aengine.Engine, int, Seen, argparse.Namespace], Awaitable[None]]
WORKLOADS: dict[str, Workload] = {"one_chat": one_chat, "chat": chat, "shared": shared, "unique": unique}


async def measure(options: argparse.Namespace, report: Report) -> None:
    knobs: dict[str, Any] = {"device": options.device, "progress": False}
    if options.kv_cache_gib:
        knobs["kv_cache_gib"] = options.kv_cache_gib
    async with AsyncExitStack() as stack:
        if options.shape != "demo":
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            write_config(Path(scratch), options.shape)
            knobs |= {"model": scratch, "load_format": "dummy"}
        # One model after the other would see two different machines: both are there, and take turns.
        engines = {
            on: await stack.enter_async_context(aengine.Engine(prefix_cache=on, **knobs)) for on in (True, False)
        }
        gc.collect()
        gc.freeze()  # as the server does: walking torch's objects takes 0.1 s, in the middle of a run
        for name in options.only or WORKLOADS:
            found: dict[bool, list[Seen]] = {True: [], False: []}
            for run in range(options.runs + 1):
                for on, engine in list(engines.items())[:: 1 if run % 2 else -1]:  # each goes first every other time
                    seen = Seen()
                    began = time.perf_counter()
                    await WORKLOADS[name](engine, run, seen, options)
                    seen.seconds = time.perf_counter() - began
                    engine.flush_cache()
                    if run:  # the first one warms up
                        found[on].append(seen)
            tell(report, options, name, found[True], found[False])
        for engine in engines.values():
            while engine.stats().running:
                await asyncio.sleep(0.01)
            engine.check_integrity()


def tell(report: Report, options: argparse.Namespace, name: str, on: list[Seen], off: list[Seen]) -> None:
    """One workload; ratios are medians over pairs of runs, one right after the other."""
    pairs = list(zip(on, off, strict=True))
    report.tell(
        {"device": options.device, "shape": options.shape, "work": name, "requests": len(on[0].first)},
        {
            "prompt_tokens": on[0].prompt_tokens,
            "hit_rate": on[0].cached_tokens / on[0].prompt_tokens,
            "s_with": statistics.median(seen.seconds for seen in on),
            "s_without": statistics.median(seen.seconds for seen in off),
            "time_saved": statistics.median(1 - with_it.seconds / without.seconds for with_it, without in pairs),
            "ttft_ms_with": 1e3 * statistics.median(first for seen in on for first in seen.first),
            "ttft_ms_without": 1e3 * statistics.median(first for seen in off for first in seen.first),
        },
        runs={"s_with": [seen.seconds for seen in on], "s_without": [seen.seconds for seen in off]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=["demo", *SMALL, *SHAPES], default="demo")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--shared", type=int, default=512, help="tokens of the shared beginning")
    parser.add_argument("--prompts", type=int, default=16, help="prompts at once in shared and unique")
    parser.add_argument("--kv-cache-gib", type=float, default=0.25, help="for each of the two; on a GPU more is better")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("prefix", options.out)
    asyncio.run(measure(options, report))
    report.print_table()


if __name__ == "__main__":
    main()
