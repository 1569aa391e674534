"""The engine on one GPU or several: the workloads that peers publish, on random weights of published shapes.

    python bench/gpu.py [--shape 8b] [--quantization fp8] [--only decode1 nano ...] [--out results.jsonl]
    python bench/gpu.py --shape moe30b --only steps [--streams 1 2 4 8]

Prompts are token ids, and the whole wall time of the calls counts. Prints JSON lines, then a table with the limit of
the device (an H200) and the figures of peers with the same work. `steps` times whole decode steps of a few streams, and
compares them with the time that the device needs to read the bytes of a step. Experts count as chosen by chance.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.model.config import ModelConfig
from bench.decode_steps import tell_steps
from bench.results import Report
from bench.shapes import QUANTIZATIONS, SHAPES, ids, write_config


@dataclass(frozen=True)
class Row:
    """Figures of one workload on an H200: tokens per second, or seconds if `seconds` is set."""

    best_peer: float | None
    limit: float | None
    target: float
    seconds: bool = False

    def share(self, value: float) -> float:
        """How much of the target a value reaches."""
        return self.target / value if self.seconds else value / self.target


FIGURES = {
    "8b": {
        "decode1": Row(197, 300, 245),
        "nano": Row(8_993, 11_800, 10_500),
        "decode256": Row(11_508, 13_700, 12_600),
        "prefill": Row(40_159, 44_600, 42_000),
        "prefix": Row(0.971, 0.5, 0.80, seconds=True),
        "long32k_ttft": Row(1.248, 1.18, 1.22, seconds=True),
        "long32k": Row(160, 227, 190),
        "startup": Row(17, 4, 12, seconds=True),
    },
    "0.6b": {
        "decode1": Row(574.7, 3_800, 2_000),
        "nano": Row(22_830, None, 30_000),
        "decode256": Row(29_429, 41_000, 34_000),
        "prefill": Row(356_100, None, 370_000),
        "prefix": Row(0.543, None, 0.40, seconds=True),
        "long32k_ttft": Row(0.262, None, 0.25, seconds=True),
        "long32k": Row(385, None, 550),
    },
    "moe30b": {
        "decode1": Row(239, 746, 520),
        "8x1k": Row(None, 1_324, 1_200),
        "nano": Row(5_839, 7_700, 6_500),
        "decode256": Row(9_084, 12_500, 10_600),
        "prefill": Row(63_228, 88_000, 72_000),
    },
    "moe30b fp8": {
        "decode1": Row(242, 1_350, 520),
        "decode256": Row(10_781, 19_800, 13_500),
        "prefill": Row(64_212, 140_000, 80_000),
    },
    "gemma3-12b": {
        "decode1": Row(None, 193, 155),
        "decode256": Row(None, 8_450, 6_340),
        "prefill": Row(None, 30_350, 22_760),
    },
    "qwen3.5-9b": {
        "decode1": Row(None, 286, 215),
        "decode256": Row(None, 13_800, 10_500),
    },
    "qwen3.5-35b-a3b": {
        "decode1": Row(220, 753, 520),
        "8x1k": Row(963, 1_807, 1_450),
        "64x1k": Row(2_984, 3_926, 3_800),
        "decode256": Row(7_532, 10_000, 7_300),
    },
    "qwen3.5-35b-a3b fp8": {
        "decode1": Row(None, 1_256, 600),
        "decode256": Row(None, 15_201, 11_000),
        "prefill": Row(None, None, 100_000),
    },
    "gpt-oss-20b": {
        "decode1": Row(324, 1_220, 760),
        "64x1k": Row(5_272, 14_534, 12_500),
        "decode256": Row(12_824, 40_700, 27_000),
        "prefill": Row(None, 112_000, 88_000),
        "1k1k": Row(13_890, 34_800, 25_000),
    },
    "gpt-oss-120b": {
        "decode1": Row(224, 904, 520),
        "8x1k": Row(580, 1_999, 1_800),
        "64x1k": Row(2_051, 4_324, 4_200),
        "prefill": Row(None, 74_700, 56_000),
        "1k1k": Row(6_798, 12_190, 10_500),
        "8k1k": Row(1_828, 2_689, 2_400),
    },
    "8b fp8": {
        "decode1": Row(237, 554, 400),
        "nano": Row(9_536, 16_600, 12_500),
        "decode256": Row(13_605, 19_300, 16_000),
        "prefill": Row(55_268, 72_000, 60_000),
    },
    "8b awq": {
        "decode1": Row(204, 926, 500),
        "decode256": Row(11_959, 13_700, 12_800),
        "prefill": Row(41_169, 44_600, 41_000),
    },
}
FIGURES["8b gptq"] = FIGURES["8b awq"]
# On several GPUs.
FIGURES |= {
    "8b on 2": {
        "decode1": Row(289, 510, 380),
        "nano": Row(14_313, 23_600, 17_000),
        "decode256": Row(19_323, 27_400, 22_500),
        "prefill": Row(69_383, 89_000, 75_000),
    },
    "32b on 2": {
        "decode1": Row(90.9, 139, 118),
        "decode256": Row(6_452, 8_700, 7_400),
        "prefill": Row(17_245, 20_400, 18_300),
    },
    "moe30b on 2": {"decode1": Row(None, 1_490, 560), "decode256": Row(None, 25_000, 17_000)},
    "32b on 4": {"decode1": Row(None, 277, 190)},
}


Workload = Callable[[aengine.Engine, int, float], Awaitable[dict[str, float]]]


async def run_all(engine: aengine.Engine, work: list[tuple[list[int], int]], temperature: float) -> float:
    """Seconds until every request is done."""
    began = time.perf_counter()
    await asyncio.gather(
        *(
            engine.complete(prompt, max_tokens=tokens, temperature=temperature, ignore_eos=True)
            for prompt, tokens in work
        )
    )
    return time.perf_counter() - began


async def decode1(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
    work = [(ids(random.Random(run), 128), 512)]
    return {"decode1": 512 / await run_all(engine, work, temperature)}


async def nano(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
    rng = random.Random(0)
    prompts = [ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    work = [(prompt, rng.randint(100, 1024)) for prompt in prompts]
    return {"nano": sum(tokens for _, tokens in work) / await run_all(engine, work, temperature)}


async def decode256(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
    rng = random.Random(100 + run)
    return {"decode256": 256 * 512 / await run_all(engine, [(ids(rng, 512), 512) for _ in range(256)], temperature)}


def streams(name: str, count: int, prompt: int, output: int) -> Workload:
    """Return a workload of equal requests that start together. Its figure is the tokens of all answers a second."""

    async def run_streams(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
        rng = random.Random(500 + run)
        seconds = await run_all(engine, [(ids(rng, prompt), output) for _ in range(count)], temperature)
        return {name: count * output / seconds}

    return run_streams


async def prefill(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
    rng = random.Random(200 + run)
    return {"prefill": 32 * 4096 / await run_all(engine, [(ids(rng, 4096), 1) for _ in range(32)], 0.0)}


async def prefix(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
    rng = random.Random(300 + run)
    shared = ids(rng, 4096)
    await run_all(engine, [(shared + ids(rng, 128), 1)], 0.0)
    return {"prefix": await run_all(engine, [(shared + ids(rng, 128), 64) for _ in range(64)], temperature)}


async def long32k(engine: aengine.Engine, run: int, temperature: float) -> dict[str, float]:
    prompt = ids(random.Random(400 + run), 32768)
    began = time.perf_counter()
    first = 0.0
    async for _ in engine.generate(prompt, max_tokens=128, temperature=temperature, ignore_eos=True):
        first = first or time.perf_counter()
    return {"long32k_ttft": first - began, "long32k": 127 / (time.perf_counter() - first)}


WORKLOADS: dict[str, Workload] = {
    "decode1": decode1,
    "nano": nano,
    "decode256": decode256,
    "prefill": prefill,
    "prefix": prefix,
    "long32k": long32k,
    "1k1k": streams("1k1k", 256, 1024, 1024),
    "8x1k": streams("8x1k", 8, 1024, 512),
    "64x1k": streams("64x1k", 64, 1024, 512),
    "8k1k": streams("8k1k", 64, 8192, 1024),
}
MAIN = [name for name in WORKLOADS if name not in ("8x1k", "64x1k", "8k1k")]


async def measure(options: argparse.Namespace, report: Report) -> None:
    ranks = options.tensor_parallel_size
    name = " ".join(filter(None, (options.shape, options.quantization, f"on {ranks}" if ranks > 1 else None)))

    def tell(figure: str, values: list[float]) -> None:
        row = FIGURES.get(name, {}).get(figure)
        reference = {} if row is None else {"limit": row.limit, "best_peer": row.best_peer, "target": row.target}
        value = statistics.median(values)
        report.tell(
            {"shape": name, "figure": figure},
            {"value": value, "of_target": None if row is None else row.share(value)},
            runs={"value": values},
            reference=reference,
        )

    # 1 for mixtures: sequences then differ, so that all experts are read.
    mixtures = {"num_experts", "num_local_experts", "n_routed_experts"}
    temperature = 1.0 if mixtures & SHAPES[options.shape].keys() else 0.6
    with tempfile.TemporaryDirectory() as scratch:
        write_config(Path(scratch), options.shape, quantization=options.quantization)
        began = time.perf_counter()
        knobs = dict(pair.split("=", 1) for pair in options.knob) | {"tensor_parallel_size": ranks}
        async with aengine.Engine(scratch, load_format="dummy", device="cuda", **knobs) as engine:
            tell("startup_dummy", [time.perf_counter() - began])
            gc.collect()
            gc.freeze()  # as the server does: walking torch's objects takes 0.1 s, in the middle of a run
            if "steps" in options.only:
                config = ModelConfig.from_folder(Path(scratch))
                kv_dtype = torch.float8_e4m3fn if knobs.get("kv_cache_dtype") == "fp8" else torch.bfloat16
                await tell_steps(
                    engine, config, {"shape": name}, report,
                    streams=options.streams, runs=options.runs, temperature=temperature, kv_dtype=kv_dtype,
                )  # fmt: skip
            for workload in [workload for workload in options.only if workload in WORKLOADS]:
                found: dict[str, list[float]] = {}
                for run in range(options.runs + 1):
                    figures = await WORKLOADS[workload](engine, run, temperature)
                    for figure, value in figures.items():
                        if run:  # the first one warms up
                            found.setdefault(figure, []).append(value)
                    engine.flush_cache()
                engine.check_integrity()
                for figure, values in found.items():
                    tell(figure, values)
            peak = max(torch.cuda.max_memory_reserved(rank) for rank in range(ranks)) / 2**30
            report.tell({"shape": name}, {"peak_gib": peak}, detail={"stats": str(engine.stats())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--quantization", choices=list(QUANTIZATIONS), help="as checkpoints of that kind have it")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that the model is spread over")
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, "steps"], default=MAIN)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8], help="of steps")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--knob", action="append", default=[], help="name=value of an EngineConfig knob")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report = Report("gpu", options.out)
    asyncio.run(measure(options, report))
    report.print_table()


if __name__ == "__main__":
    main()
