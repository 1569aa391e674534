"""The demo model on this machine's CPU, with its own drafts and without drafts.

    python bench/demo_drafts.py [--runs 5] [--out results.jsonl]

One stream, five chats one after the other, greedy. Two engines take turns. The ratio is a median over the turns,
because a CPU's speed drifts. The answers must be the same ids.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from bench.results import Report

TARGET = 1.3  # times the speed without drafts
CHATS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Count from 1 to 20.",
    "What is the weather in Paris?",
    "Say hello.",
)


async def answer_all(engine: aengine.Engine) -> tuple[float, int, list[Sequence[int]]]:
    """Return the wall seconds, the steps, and the ids of the answers."""
    before, began, answers = engine.stats().steps, time.perf_counter(), []
    for chat in CHATS:
        answer = await engine.chat([{"role": "user", "content": chat}], max_tokens=100, temperature=0)
        answers.append(answer.choices[0].token_ids)
    return time.perf_counter() - began, engine.stats().steps - before, answers


async def compare(report: Report, runs: int) -> None:
    """Measure both engines in turns."""
    async with (
        aengine.Engine(device="cpu", prefix_cache=False, progress=False, speculation="off") as plain,
        aengine.Engine(device="cpu", prefix_cache=False, progress=False) as drafting,
    ):
        turns = []
        for _ in range(runs + 1):
            off, on = await answer_all(plain), await answer_all(drafting)
            if off[2] != on[2]:
                raise SystemExit("the answers with drafts differ from those without")
            turns.append((off, on))
    del turns[0]  # warm-up
    ratios = [off[0] / on[0] for off, on in turns]
    tokens = sum(map(len, turns[0][0][2]))
    report.tell(
        {"model": "demo", "chats": len(CHATS), "tokens": tokens},
        {
            "steps_without": turns[0][0][1],
            "steps_with": statistics.median(on[1] for _, on in turns),
            "without_tok_s": tokens / statistics.median(off[0] for off, _ in turns),
            "with_tok_s": tokens / statistics.median(on[0] for _, on in turns),
            "ratio": statistics.median(ratios),
        },
        runs={"ratio": ratios},
        reference={"target": TARGET},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("demo_drafts", options.out)
    asyncio.run(compare(report, options.runs))
    report.print_table()


if __name__ == "__main__":
    main()
