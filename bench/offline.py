"""The engine against transformers on this machine: same checkpoint, same prompts, same work.

    python bench/offline.py [--models demo 30m] [--runs 3] [--out results.jsonl]

Two workloads: one request (32 in, 128 out), and 32 requests of mixed lengths (16-256 in, 16-256 out), which
`generate` gets as one left-padded batch that runs to its longest output, and transformers' continuous batching as
they are. Greedy, EOS ignored, float32. The three take turns. Tokens per second count the requested tokens only.
Ratios, to the faster of transformers' two, are medians over the turns.
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
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.model.loading.hub import resolve_model
from bench.results import Report

TARGETS = {("demo", "one"): 1.3, ("demo", "mixed"): 3.0, ("30m", "mixed"): 3.0}

Work = list[tuple[list[int], int]]  # (prompt ids, tokens to draw)


def make_work(name: str) -> Work:
    """Seeded prompts of ids below 4000 and how many tokens each draws."""
    rng = random.Random(0)
    if name == "one":
        return [([rng.randrange(300, 4000) for _ in range(32)], 128)]
    return [([rng.randrange(300, 4000) for _ in range(rng.randint(16, 256))], rng.randint(16, 256)) for _ in range(32)]


def make_30m(folder: Path) -> Path:
    """A random 30 M parameter Qwen3 with the demo model's tokenizer."""
    config = transformers.Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((resolve_model(None, None) / name).read_bytes())
    return folder


def load_peer(folder: Path) -> Any:
    """Load a model in transformers. The demo model also takes images."""
    sees = hasattr(transformers.AutoConfig.from_pretrained(folder), "vision_config")
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


class Peer:
    """transformers' generate, with its defaults."""

    def __init__(self, folder: Path) -> None:
        self.model = load_peer(folder)
        self.model.generation_config.eos_token_id = None

    def run(self, work: Work) -> float:
        longest = max(len(prompt) for prompt, _ in work)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in work])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in work])
        tokens = max(tokens for _, tokens in work)
        began = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        return time.perf_counter() - began


class ContinuousPeer:
    """transformers' continuous batching. Its pool and steps are sized by hand: it measures only GPUs."""

    def __init__(self, folder: Path) -> None:
        self._model = load_peer(folder)
        self._model.generation_config.eos_token_id = -1
        self._sizes = transformers.ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=512)

    def run(self, work: Work) -> float:
        """Return wall seconds. Raises: RuntimeError if its loop has died."""
        with self._model.continuous_batching_context_manager(continuous_batching_config=self._sizes) as manager:
            began = time.perf_counter()
            for prompt, tokens in work:
                manager.add_request(prompt, max_new_tokens=tokens)
            waited_for = len(work)
            while waited_for:
                result = manager.get_result(timeout=1)
                if result is not None:
                    waited_for -= result.is_finished()
                elif (error := manager.background_thread_status.fatal_error) is not None:
                    raise RuntimeError("transformers' continuous batching failed") from error
            return time.perf_counter() - began


async def run_engine(engine: aengine.Engine, work: Work) -> float:
    """Wall seconds from the first submit to the last token."""
    began = time.perf_counter()
    await asyncio.gather(
        *(engine.complete(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) for prompt, tokens in work)
    )
    return time.perf_counter() - began


async def compare(report: Report, model: str, folder: Path, runs: int) -> None:
    """Both engines in turn, on each workload."""
    peers = {"generate": Peer(folder), "continuous": ContinuousPeer(folder)}
    threads = torch.get_num_threads()
    async with aengine.Engine(str(folder), prefix_cache=False, device="cpu", dtype="float32") as engine:
        for name in ("one", "mixed"):
            work = make_work(name)
            tokens = sum(tokens for _, tokens in work)
            turns: list[dict[str, float]] = []
            for _ in range(runs + 1):
                turns.append({"aengine": await run_engine(engine, work)})
                turns[-1].update({peer: each.run(work) for peer, each in peers.items()})
            del turns[0]  # warm-up
            ratios = [min(turn[peer] for peer in peers) / turn["aengine"] for turn in turns]
            report.tell(
                {"model": model, "work": name, "requests": len(work), "tokens": tokens},
                {
                    f"{each}_tok_s": tokens / statistics.median(turn[each] for turn in turns)
                    for each in ("aengine", *peers)
                }
                | {"ratio": statistics.median(ratios)},
                runs={"ratio": ratios},
                reference={"target": TARGETS.get((model, name))},
                detail={"transformers_threads": threads},
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["demo", "30m"], default=["demo", "30m"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("offline", options.out)
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            folder = resolve_model(None, None) if model == "demo" else make_30m(Path(scratch))
            asyncio.run(compare(report, model, folder, options.runs))
    report.print_table()


if __name__ == "__main__":
    main()
