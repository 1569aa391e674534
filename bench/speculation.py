"""Speed with speculation on random weights, whose acceptance is pinned to a curve.

    python bench/speculation.py --shape 8b --proposer ngram --drafts 4 --streams 1 8 [--out results.jsonl]
    python bench/speculation.py --shape qwen3.5-9b --proposer mtp --drafts 3
    python bench/speculation.py --proposer eagle3 --streams 1 64 256 --rejected --prompts
    python bench/speculation.py --proposer dflash --drafts 15

Random weights accept almost no draft. So each draft is replaced before its verification: it is the token that the model
draws with the probability of the curve, and another token otherwise. Proposers and heads run at full cost. A curve has
the mean number of tokens of a step, for 1, 2, 3 ... drafts. The defaults are the acceptance that the field agreed on:
Kimi-K2.5 with EAGLE-3, and Qwen3.5-397B with its MTP layer. For DFlash heads there is none. Their default is that of a
head published for Qwen3-8B: of its first drafts 82.2 % are accepted, and a step has 3.74 tokens. `--rejected` measures
once more, with no draft accepted. `--prompts` also measures what a head costs while prompts are read. `--steps` also
reports how long the device takes for each kind of step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.kernels.decodes import triton_decodes
from aengine.kernels.decodes.base import Verdict
from aengine.runtime import runner
from aengine.runtime.step import verdict
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.verdict import DraftedRows
from aengine.sampling.sampler import Draws
from aengine.timeline import DEVICE
from bench.results import Report
from bench.shapes import QUANTIZATIONS, SHAPES, SMALL, ids, write_config

CURVES = {
    "ngram": [1.8, 2.44, 2.95, 3.36],
    "mtp": [1.93, 2.73, 3.39, 3.97],
    "eagle3": [1.83, 2.43, 2.88, 3.24],
    # Of the drafts after an accepted one, 70 % are accepted, too.
    "dflash": [round(1 + 0.822 * (1 - 0.7**n) / (1 - 0.7), 2) for n in range(1, 16)],
}
CONTEXT = 4096
PROMPT, OUTPUT = 512, 256  # tokens
LONG, LONG_PROMPTS = 4000, 32  # tokens of a prompt, and how many are read together, in the case `prompts`
SETTLED = 160  # steps of a number of streams after which the engine knows the times of its steps


def survival(curve: list[float]) -> list[float]:
    """Return the probability that the first 1, 2, ... drafts of a step are all accepted."""
    return [after - before for before, after in itertools.pairwise([1.0, *curve])]


@contextmanager
def pinned(curve: list[float]) -> Iterator[None]:
    """Pin the acceptance of all engines in this process."""
    real, real_end, chances = verdict.verify, triton_decodes.end, survival(curve)

    def draft(rows: Tensor, drawn: Tensor, next_tokens: Tensor) -> None:
        """Write drafts of rows. drawn: [n, most drafts + 1], the draws at all places."""
        chance = torch.rand(len(rows), device=rows.device)
        for column, share in enumerate(chances[: drawn.shape[1] - 1]):
            one = torch.where(chance < share, drawn[:, column], (drawn[:, column] - 1).abs())
            next_tokens[1 + column].index_copy_(0, rows, one)

    def verify(drafted: DraftedRows, draws: Draws, rows: Rows) -> None:
        draft(drafted.rows, drafted.gather(draws.token_ids), rows.next_tokens)
        real(drafted, draws, rows)

    def end(
        row_index: Tensor, drafts: Tensor, token_ids: Tensor, finite: Tensor, next_tokens: Tensor, *others: Any
    ) -> Verdict:
        draft(row_index, token_ids.view(len(row_index), -1), next_tokens)  # captured, with torch's random numbers
        return real_end(row_index, drafts, token_ids, finite, next_tokens, *others)

    runner.verify = verify  # type: ignore[attr-defined]
    triton_decodes.end = end
    try:
        yield
    finally:
        runner.verify = real  # type: ignore[attr-defined]
        triton_decodes.end = real_end


def write_target(folder: Path, shape: str, quantization: str | None, proposer: str) -> None:
    """Write the configuration of the target, with an MTP layer if that is the proposer."""
    write_config(folder, shape, quantization=quantization)
    if proposer == "mtp":
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mtp_num_hidden_layers": 1}))


def write_eagle3(folder: Path) -> str:
    """Write the configuration of an EAGLE-3 head for the target in a folder, and return the knob that uses it."""
    target = json.loads((folder / "config.json").read_text())
    target.setdefault("intermediate_size", 4 * target["hidden_size"])  # mixtures have none
    head = folder / "head"
    head.mkdir()
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layer = {name: target[name] for name in (*kept, "rms_norm_eps", "rope_theta", "hidden_act", "attention_bias")}
    layer |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    layer |= {"draft_vocab_size": min(32000, target["vocab_size"]), "max_position_embeddings": CONTEXT}
    (head / "config.json").write_text(json.dumps(layer))
    return f"eagle3={head}"


def write_dflash(folder: Path) -> str:
    """Write the configuration of a DFlash head for the target in a folder, and return the knob that uses it.

    Its sizes are those of the heads that are published for Qwen3: five layers that read five layers of the target.
    """
    target = json.loads((folder / "config.json").read_text())
    target.setdefault("intermediate_size", 4 * target["hidden_size"])  # mixtures have none
    head, layers = folder / "head", target["num_hidden_layers"]
    head.mkdir()
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {name: target[name] for name in (*kept, "rms_norm_eps", "rope_theta", "hidden_act")}
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5, "block_size": 16}
    config |= {"max_position_embeddings": CONTEXT, "attention_bias": False}
    taps = [1 + i * (layers - 4) // 4 for i in range(5)]
    config["dflash_config"] = {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps}
    (head / "config.json").write_text(json.dumps(config))
    return f"dflash={head}"


HEADS = {"eagle3": write_eagle3, "dflash": write_dflash}


async def measure(options: argparse.Namespace, report: Report) -> None:
    """Measure tokens per second for each number of streams, without speculation and with it."""
    curve = options.curve or CURVES[options.proposer]
    kinds = [("off", curve), (options.proposer, curve)]
    if options.rejected:
        kinds.append((options.proposer, [1.0] * len(curve)))
    plain: dict[str, float] = {}
    for proposer, curve in kinds:
        with tempfile.TemporaryDirectory() as name, pinned(curve):
            folder = Path(name)
            write_target(folder, options.shape, options.quantization, proposer)
            knob = HEADS[proposer](folder) if proposer in HEADS else proposer
            drafts = 0 if proposer == "off" else options.drafts
            case = {"shape": options.shape, "quantization": options.quantization or "none", "proposer": proposer}
            case |= {"drafts": drafts, "curve": "-" if proposer == "off" else " ".join(map(str, curve))}
            timeline = str(folder / "steps.json") if options.steps else None
            async with aengine.Engine(
                str(folder), load_format="dummy", max_model_len=CONTEXT, speculation=knob, draft_tokens=drafts,
                timeline=timeline, progress=False,
            ) as engine:  # fmt: skip
                for streams in options.streams:
                    figures = await median_of(engine, options, streams)
                    speed = figures["tokens_per_second"]
                    ratio = speed / plain.setdefault(f"streams {streams}", speed)
                    report.tell(case | {"streams": streams}, figures, reference={"ratio": ratio})
                if options.prompts:
                    for prompts in (1, LONG_PROMPTS):
                        seconds = await reading(engine, prompts, options.runs)
                        figures = {"tokens_per_second": prompts * LONG / seconds, "first_token_ms": 1e3 * seconds}
                        ratio = plain.setdefault(f"prompts {prompts}", seconds) / seconds
                        report.tell(case | {"prompts": prompts}, figures, reference={"ratio": ratio})
            for kind, figures in step_times(folder / "steps.json").items() if options.steps else ():
                report.tell(case | dict(zip(("rows", "verified", "with prompts"), kind)), figures)


def step_times(timeline: Path) -> dict[tuple[int, float, bool], dict[str, float]]:
    """Return the number of steps of each kind and their mean milliseconds on the device.

    A kind: the rows that decode, rounded down to a power of two; the drafts of a row on average, in quarters; whether
    prompts are read.
    """
    kinds: dict[tuple[int, float, bool], list[float]] = defaultdict(list)
    for event in json.loads(timeline.read_bytes()):
        counts = event["args"]
        if event.get("tid") != DEVICE or event["ph"] != "X":
            continue
        if "decode" in counts:
            rows = counts["decode"]
            drafts = round(4 * counts["drafts"] / max(rows, 1)) / 4
            times = kinds[1 << rows.bit_length() - 1 if rows else 0, drafts, counts["prompt_tokens"] > 0]
            times.append(0.0)
        times[-1] += event["dur"] / 1e3  # the draws of a step may have an event of their own
    return {kind: {"steps": len(times), "ms": sum(times) / len(times)} for kind, times in sorted(kinds.items())}


async def reading(engine: aengine.Engine, prompts: int, runs: int) -> float:
    """Return the median seconds until the first tokens of new prompts are all there."""
    found, rng = [], random.Random(-prompts)
    for _ in range(runs + 1):
        texts = [ids(rng, LONG, 4000) for _ in range(prompts)]
        began = time.perf_counter()
        await asyncio.gather(*(engine.complete(text, max_tokens=1, temperature=0, ignore_eos=True) for text in texts))
        found.append(time.perf_counter() - began)
    return sorted(found[1:])[runs // 2]  # the first run warms up


async def median_of(engine: aengine.Engine, options: argparse.Namespace, streams: int) -> dict[str, float]:
    """Return the figures of the median run. Tokens and drafts of a step are those of a stream.

    Runs in which the engine still learns the times of steps are left out.
    """
    found: list[dict[str, float]] = []
    rng, first = random.Random(streams), engine.stats().steps
    while len(found) < options.runs:
        prompts = [ids(rng, PROMPT, 4000) for _ in range(streams)]
        before, began = engine.stats(), time.perf_counter()
        await asyncio.gather(
            *(
                engine.complete(prompt, max_tokens=OUTPUT, temperature=options.temperature, ignore_eos=True)
                for prompt in prompts
            )
        )
        seconds, after = time.perf_counter() - began, engine.stats()
        steps = after.steps - before.steps
        if before.steps - first >= SETTLED:
            found.append(
                {
                    "tokens_per_second": streams * OUTPUT / seconds,
                    "step_ms": 1e3 * seconds / steps,
                    "tokens_per_step": OUTPUT / steps,
                    "drafts_per_step": (after.drafted_tokens - before.drafted_tokens) / steps / streams,
                }
            )
    return sorted(found, key=lambda figures: figures["tokens_per_second"])[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES | SMALL))
    parser.add_argument("--quantization", choices=sorted(QUANTIZATIONS))
    parser.add_argument("--proposer", default="ngram", choices=sorted(CURVES))
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--curve", type=float, nargs="+", help="mean tokens of a step for 1, 2, ... drafts")
    parser.add_argument("--rejected", action="store_true", help="measure also with no draft accepted")
    parser.add_argument("--prompts", action="store_true", help="measure also how fast prompts are read")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", action="store_true", help="report how long each kind of step takes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("speculation", options.out)
    asyncio.run(measure(options, report))
    report.print_table()


if __name__ == "__main__":
    main()
