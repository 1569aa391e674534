"""What host memory for KV pages saves: chats that return after their pages have left the pool.

    python bench/host_cache.py [--device cuda --shape 8b --chats 32 --tokens 16384 --times 3]

The KV of all chats is `--times` the pool, and host memory holds all of it. computed: the first turn of each chat,
alone.
returned: the next turn of each chat (the whole history and 32 more tokens), alone and in the same order, so that the
pool holds nothing of it. Then the cost for other streams is measured: alone, while a chat in the pool returns every
`--pause` seconds, and while a chat in host memory does. The step is the mean time between two tokens of a stream, p99
is of all gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.model.config import ModelConfig
from aengine.runtime.device import resolve_device, resolve_dtype, resolve_kv_dtype
from bench.results import Report
from bench.shapes import SHAPES, SMALL, write_config

ANSWER = 16
NEXT = 32  # tokens that a returning chat adds


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 4000) for _ in range(count)]


class Chat:
    """A conversation: all that was said so far."""

    def __init__(self, rng: random.Random, tokens: int) -> None:
        self.history = ids(rng, tokens)
        self.cached = 0

    async def turn(self, engine: aengine.Engine, more: list[int]) -> float:
        """Say something, hear the answer: seconds to its first token."""
        self.history += more
        began, first = time.perf_counter(), 0.0
        answer: list[int] = []
        async for fragment in engine.generate(self.history, max_tokens=ANSWER, temperature=0, ignore_eos=True):
            first = first or time.perf_counter() - began
            answer.extend(fragment.token_ids)
            if fragment.usage is not None:
                self.cached = fragment.usage.cached_tokens
        self.history += answer
        return first


class Streams:
    """Streams that decode all the time; when each token of the first one came."""

    def __init__(self, engine: aengine.Engine, rng: random.Random, count: int, tokens: int) -> None:
        self.times: list[float] = []
        self._tasks = [
            asyncio.ensure_future(self._follow(engine, ids(rng, 128), tokens, index == 0)) for index in range(count)
        ]

    async def _follow(self, engine: aengine.Engine, prompt: list[int], tokens: int, note: bool) -> None:
        async for _ in engine.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
            if note:
                self.times.append(time.perf_counter())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps(self, began: float) -> list[float]:
        times = [moment for moment in self.times if moment >= began]
        return [after - before for before, after in itertools.pairwise(times)]


async def beside(
    engine: aengine.Engine, streams: Streams, chats: list[Chat], rng: random.Random, seconds: float, pause: float
) -> list[float]:
    """The streams' gaps while the chats return in turns."""
    began, number = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        if chats:
            await chats[number % len(chats)].turn(engine, ids(rng, NEXT))
            number += 1
        await asyncio.sleep(pause)
    return streams.gaps(began)


async def bench(options: argparse.Namespace, report: Report, folder: Path) -> None:
    write_config(folder, options.shape)
    rng = random.Random(0)
    model = ModelConfig.from_folder(folder)
    device = resolve_device(options.device)
    dtype = resolve_dtype("auto", device, model.dtype)
    page = model.kv_shape(16, resolve_kv_dtype("auto", dtype)).page_bytes
    whole = options.chats * (options.tokens // 16 + 16) * page
    began = time.perf_counter()
    async with aengine.Engine(
        model=str(folder),
        load_format="dummy",
        device=options.device,
        kv_cache_gib=whole / options.times / 2**30,
        host_cache_gib=1.1 * whole / 2**30,
        max_num_seqs=32,
        max_model_len=options.tokens + 2048,
        progress=False,
    ) as engine:
        ready = time.perf_counter() - began
        gc.collect()
        gc.freeze()
        case = {"shape": options.shape, "chats": options.chats, "tokens": options.tokens, "times": options.times}
        chats = [Chat(rng, options.tokens) for _ in range(options.chats)]
        await Chat(rng, 256).turn(engine, [])
        computed = [await chat.turn(engine, []) for chat in chats]
        before = engine.stats()
        returned = [await chat.turn(engine, ids(rng, NEXT)) for chat in chats]
        after = engine.stats()
        found = (after.cached_tokens - before.cached_tokens) / (after.prompt_tokens - before.prompt_tokens)
        in_host = after.cached_host_tokens - before.cached_host_tokens
        resident = [await chat.turn(engine, ids(rng, NEXT)) for chat in chats[-3:]]
        first, back = statistics.median(computed), statistics.median(returned)
        report.tell(
            case,
            {
                "computed_s": first,
                "returned_s": back,
                "share": back / first,
                "in_pool_s": statistics.median(resident),
                "worst_s": max(returned),
                "found": found,
                "from_host": in_host / max(1, after.cached_tokens - before.cached_tokens),
                "ready_s": ready,
            },
            reference={"target_share": 0.2},
            runs={"computed_s": computed, "returned_s": returned},
            detail={"lost_pages": after.host_misses, "stored_pages": after.host_stores, "loaded": after.host_loads},
        )
        streams = Streams(engine, rng, options.streams, 1500)
        await asyncio.sleep(0.5)
        alone = await beside(engine, streams, [], rng, options.seconds, options.pause)
        pool = await beside(engine, streams, chats[-2:], rng, options.seconds, options.pause)
        loads = engine.stats().host_loads
        host = await beside(engine, streams, chats[:-3], rng, options.seconds, options.pause)
        pages = engine.stats().host_loads - loads
        await streams.close()
        for name, gaps in (("alone", alone), ("beside chats in the pool", pool), ("beside chats in host memory", host)):
            report.tell(
                {**case, "streams": options.streams, "what": name},
                {
                    "step_ms": 1e3 * statistics.fmean(gaps),
                    "p50_ms": 1e3 * statistics.median(gaps),
                    "p99_ms": 1e3 * sorted(gaps)[len(gaps) * 99 // 100],
                    "worst_ms": 1e3 * max(gaps),
                    "to_pool": statistics.fmean(gaps) / statistics.fmean(pool),
                },
                detail={"loaded_pages": pages if gaps is host else 0},
            )
        engine.check_integrity()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=[*SHAPES, *SMALL], default="8b")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--pause", type=float, default=0.2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("host_cache", options.out)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(bench(options, report, Path(folder)))
    report.print_table()


if __name__ == "__main__":
    main()
