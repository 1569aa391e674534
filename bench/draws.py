"""The cost of penalties, logprobs and cut-offs relative to greedy draws, in tokens a second of the whole engine.

    python bench/draws.py [--shape 8b] [--rows 256] [--input 64] [--output 192] [--out results.jsonl]

Random weights of a published shape on a GPU; `--device cpu` takes the demo model. The kinds take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from bench.results import Report
from bench.shapes import SHAPES, write_config

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
CUT_OFFS = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "penalties": PENALTIES,
    "5 logprobs": {"logprobs": 5},
    "20 logprobs": {"logprobs": 20},
    "top_p with top_k": CUT_OFFS,
    "all of it": {**PENALTIES, **CUT_OFFS, "logprobs": 20},
}
LEAST_SHARE = 0.97  # the target for penalties and logprobs


async def measure(options: argparse.Namespace, report: Report, scratch: Path) -> None:
    knobs: dict[str, object] = {"device": options.device, "max_num_seqs": options.rows}
    if options.device != "cpu":
        write_config(scratch, options.shape)
        knobs |= {"model": str(scratch), "load_format": "dummy"}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with aengine.Engine(**knobs) as engine:
        for run in range(options.runs + 1):
            for kind, params in KINDS.items():
                rng = random.Random(run)
                prompts = [[rng.randrange(100, 4000) for _ in range(options.input)] for _ in range(options.rows)]
                drawn = {"max_tokens": options.output, "temperature": 0.0, "ignore_eos": True, **params}
                began = time.perf_counter()
                await asyncio.gather(*(engine.complete(prompt, **drawn) for prompt in prompts))
                if run:  # the first one warms up
                    found[kind].append(options.rows * options.output / (time.perf_counter() - began))
                engine.flush_cache()
    greedy = statistics.median(found["greedy"])
    for kind, rates in found.items():
        rate = statistics.median(rates)
        asked = LEAST_SHARE if kind == "penalties" or kind.endswith("logprobs") else None
        report.tell(
            {"rows": options.rows, "kind": kind},
            {"tok_s": rate, "of_greedy": rate / greedy},
            runs={"tok_s": rates},
            reference={"target": asked},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=192)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("draws", options.out)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(options, report, Path(scratch)))
    report.print_table()


if __name__ == "__main__":
    main()
