"""The cost of grammars: a batch with constrained rows against one without, on the demo model.

    python bench/structured.py [--out results.jsonl]

Tokens per second of both, taken in turns, and the time that filling a mask takes per row.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine import Structured
from aengine.text.grammar.grammars import Grammars, Matcher
from bench.results import Report

ROWS = 32
TOKENS = 200
ROUNDS = 5
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 30}, "minItems": 100}


async def tokens_per_second(engine: aengine.Engine, constrained: int) -> float:
    options: list[dict[str, Any]] = [{"ignore_eos": True, "temperature": 0.0} for _ in range(ROWS)]
    for own in options[:constrained]:
        own["structured"] = Structured(json=SCHEMA)
    began = time.perf_counter()
    completions = await asyncio.gather(
        *(engine.complete([300 + row, 301], max_tokens=TOKENS, **own) for row, own in enumerate(options))
    )
    return sum(completion.usage.completion_tokens for completion in completions) / (time.perf_counter() - began)


async def fill_microseconds(engine: aengine.Engine) -> list[float]:
    """Per row and step, in the order of an output drawn at random from the masks."""
    rng = np.random.default_rng(0)
    grammars = Grammars(engine.tokenizer, engine.vocab_size, (4091,))
    matcher: Matcher = await grammars.matcher(Structured(json=SCHEMA))
    times = []
    for _ in range(500):
        began = time.perf_counter()
        (mask,) = grammars._fill([matcher], [()]).bits
        times.append((time.perf_counter() - began) * 1e6)
        allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]
        matcher.accept(int(rng.choice(allowed)))
    grammars.close()
    return times


async def measure(report: Report) -> None:
    async with aengine.Engine(device="cpu", progress=False, kv_cache_gib=0.2) as engine:
        rates: dict[int, list[float]] = {0: [], 4: [], 32: []}
        await tokens_per_second(engine, 4)
        for _ in range(ROUNDS):  # in turns: whatever else the machine does hits all alike
            for constrained, seen in rates.items():
                seen.append(await tokens_per_second(engine, constrained))
        for constrained, seen in rates.items():
            beside = [one / none for one, none in zip(seen, rates[0], strict=True)]
            report.tell(
                {"rows": ROWS, "constrained": constrained},
                {"tok_s": statistics.median(seen), "of_unconstrained": statistics.median(beside)},
                runs={"tok_s": seen},
            )
        times = np.array(await fill_microseconds(engine))
        report.tell(
            {"work": "filling a row's mask"},
            {"us_mean": times.mean(), "us_p50": float(np.median(times)), "us_p99": float(np.percentile(times, 99))},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    report = Report("structured", parser.parse_args().out)
    asyncio.run(measure(report))
    report.print_table()


if __name__ == "__main__":
    main()
