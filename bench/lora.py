"""The cost of adapters: for streams that use one, and for a server that only has some loaded.

    python bench/lora.py [--shape 8b] [--rank 16] [--adapters 8 64] [--streams 64] [--runs 3] [--out results.jsonl]

The base weights are random. One PEFT folder with random factors for all linears is loaded under many names. A server
without adapters and one with them, both in this process, take turns at the same work, because the device's clock
follows its heat. The work is `--streams` streams of 512 tokens in and 256 out, each with an adapter in turn or with
none, and one stream of 128 in and 512 out. A share is relative to the server without adapters in the same turn. Then
further adapters are loaded while all streams decode, and the longest wait for a token is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from bench.results import Report
from bench.shapes import SHAPES, SMALL, write_config

MANY, ONE = (512, 256), (128, 512)  # tokens in and out
KV_GIB = 16  # of each server
LOADED = 5  # one after the other, each put on the device before the next one is read
VLLM = {"8b": {8: 0.64}}  # share of its speed without adapters, 64 streams, rank 16
TARGETS = {"streams": {0: 0.995, 8: 0.9, 64: 0.74}, "one stream": {1: 0.91}}
MOST_GAP_MS = 60
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model: Path, rank: int) -> None:
    """Write a PEFT folder for all linears of the model whose config.json is in the folder."""
    config = json.loads((model / "config.json").read_text())
    hidden, inter, dim = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = dict(
        zip(MODULES, ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inter), (hidden, inter)))
    )
    shapes["down_proj"] = (inter, hidden)
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            room = "self_attn" if name[0] in "qkvo" else "mlp"
            at = f"base_model.model.model.layers.{layer}.{room}.{name}"
            for factor, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                random_factor = torch.randn(shape, generator=generator).mul_(0.01)
                tensors[f"{at}.{factor}.weight"] = random_factor.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings |= {"target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@asynccontextmanager
async def serve(model: Path, lora: dict[str, str], streams: int) -> AsyncIterator[aengine.Engine]:
    more = {"lora": lora, "max_loras": len(lora) + 1, "lora_loading": True} if lora else {}
    settings: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "max_num_seqs": streams,
        "kv_cache_gib": KV_GIB,
        "progress": False,
        **more,
    }
    async with aengine.Engine(**settings) as engine:
        yield engine


async def run(engine: aengine.Engine, streams: int, adapters: Sequence[str | None], run: int) -> float:
    """Tokens a second of streams that take turns with the adapters; of a single one from its first token on."""
    rng = random.Random(run)
    prompt, tokens = ONE if streams == 1 else MANY
    firsts: list[float] = []

    async def follow(index: int) -> None:
        name = adapters[index % len(adapters)]
        more: dict[str, Any] = {} if name is None else {"adapter": name}
        ids = [rng.randrange(300, 4000) for _ in range(prompt)]
        first = True
        async for _ in engine.generate(ids, max_tokens=tokens, temperature=0, ignore_eos=True, **more):
            if first:
                firsts.append(time.perf_counter())
                first = False

    began = time.perf_counter()
    await asyncio.gather(*(follow(index) for index in range(streams)))
    ended = time.perf_counter()
    engine.flush_cache()
    return (tokens - 1) / (ended - firsts[0]) if streams == 1 else streams * tokens / (ended - began)


async def gaps(engine: aengine.Engine, streams: int, adapters: Sequence[str | None], path: str) -> dict[str, float]:
    """Milliseconds: the longest that a stream waited for a token, before adapters were loaded and meanwhile."""
    rng = random.Random(0)
    decoding, phase, ended = [False] * streams, "", False
    longest = {"before": 0.0, "loading": 0.0}

    async def follow(index: int) -> None:
        name = adapters[index % len(adapters)]
        more: dict[str, Any] = {} if name is None else {"adapter": name}
        ids = [rng.randrange(300, 4000) for _ in range(MANY[0])]
        last = None
        async for _ in engine.generate(ids, max_tokens=3000, temperature=0, ignore_eos=True, **more):
            now = time.perf_counter()
            if last is not None and phase:
                longest[phase] = max(longest[phase], now - last)
            last, decoding[index] = now, True
            if ended:
                break

    async def load() -> None:
        nonlocal phase, ended
        while not all(decoding):
            await asyncio.sleep(0.01)
        for phase in ("before", "loading"):  # noqa: B007 (the streams look at it)
            await asyncio.sleep(1)
        for _ in range(LOADED):
            began = time.perf_counter()
            await engine.load_adapter("further", path)
            while not engine.adapters[-1].on_device:
                await asyncio.sleep(0.001)
            took.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)  # a wait that begins here counts
            await engine.unload_adapter("further")
        ended = True

    took: list[float] = []
    gc.collect()
    gc.freeze()  # as a server does, once it is ready
    await asyncio.gather(load(), *(follow(index) for index in range(streams)))
    engine.flush_cache()
    figures = {"gap_ms": longest["loading"], "gap_before_ms": longest["before"], "load_ms": statistics.median(took)}
    return {name: seconds * 1e3 for name, seconds in figures.items()}


async def bench(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    write_config(folder, arguments.shape)
    write_adapter(folder / "adapter", folder, arguments.rank)
    names = [f"adapter-{index}" for index in range(max(arguments.adapters))]
    streams, path = arguments.streams, str(folder / "adapter")
    case = {"shape": arguments.shape, "rank": arguments.rank}

    async with serve(folder, {}, streams) as plain, serve(folder, dict.fromkeys(names, path), streams) as adapted:
        for count, several in ((streams, [0, *arguments.adapters]), (1, [0, 1])):
            servers = [("without", plain, 0), *(("with", adapted, used) for used in several)]
            turns = [
                [await run(engine, count, names[:used] or [None], number) for _, engine, used in servers]
                for number in range(arguments.runs + 1)
            ][1:]  # the first one warms up
            for place, (server, _, used) in enumerate(servers):
                target = TARGETS["one stream" if count == 1 else "streams"].get(used) if server == "with" else None
                peer = VLLM.get(arguments.shape, {}).get(used) if count == 64 and arguments.rank == 16 else None
                measured, shares = [turn[place] for turn in turns], [turn[place] / turn[0] for turn in turns]
                report.tell(
                    {**case, "server": server, "streams": count, "adapters": used},
                    {"tok_s": statistics.median(measured), "share": statistics.median(shares)},
                    runs={"tok_s": measured, "share": shares},
                    reference={"target_share": target, "vllm_share": peer},
                )
        report.tell(
            {**case, "server": "with, loading", "streams": streams, "adapters": len(names)},
            dict(await gaps(adapted, streams, names, path)),
            reference={"target_ms": MOST_GAP_MS},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *SMALL], default="8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = Report("lora", arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(bench(arguments, report, Path(folder)))
    report.print_table()


if __name__ == "__main__":
    main()
