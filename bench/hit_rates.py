"""Hit rates of the prefix cache by kind of model: full attention, windows, recurrent states.

    python bench/hit_rates.py [--shapes 8b gemma3-12b qwen3.5-9b] [--work chats agents forks] [--many 4] [--drafts 4]

Runs the engine's scheduler and cache with the pool of one H200, and a model that takes no time and gives arbitrary
answers. Cacheable tokens are those that a cache without bounds would find: the longest beginning of each prompt that
has been computed, or is being computed, for any request.

chats: 64 conversations of 8 turns at once (a system prompt of 400 tokens, questions of 20 to 200, answers of 50 to
400).
agents: 32 agents with one prompt of 20,000 tokens and 6 calls each (calls of 30 to 200 tokens, results of 100 to
1,500).
forks: 16 prompts of 3,000 tokens with 8 answers of 200 tokens each. Two further requests continue every answer.

With --drafts every row verifies that many drafts in a step, and keeps each while `--right` allows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

import aengine
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.speculation.base import NO_PROPOSER, ProposerChoice
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.sizing.pool import size_pool
from aengine.step_plan import StepPlan, StepResult
from bench.overhead import NullRunner, NullStep
from bench.results import Report
from bench.shapes import ids, write_config

POOL_GIB = {
    "8b": 105,
    "gemma3-12b": 97,
    "qwen3.5-9b": 103,
}  # nine tenths of an H200's memory less the weights, 6 to work
CONTEXT = 40_960


class RandomRunner(NullRunner):
    """Draws other tokens for every row, without a model. A draft is right by chance."""

    def __init__(self, right: float) -> None:
        self._rng = random.Random(0)
        self._right = right

    def launch(self, plan: StepPlan) -> NullStep:
        rows, drafting = plan.sampled_rows, any(plan.drafts)
        counts = [1] * len(rows)
        for place, drafts in enumerate(plan.drafts):
            accepted = takewhile(lambda _: self._rng.random() < self._right, range(drafts))
            counts[place] += min(sum(1 for _ in accepted), plan.draft_limits.get(plan.decode[place], drafts))
        draws = ids(self._rng, sum(counts))
        result = StepResult(draws, [True] * len(rows), None, counts=counts if drafting else [])
        return NullStep(plan, result)


@dataclass
class Seen:
    """The hashes of all beginnings of prompts and answers so far, and the counts of cached tokens."""

    computed: set[int] = field(default_factory=set)
    cacheable: int = 0
    found: int = 0

    def ask(self, prompt: Sequence[int]) -> None:
        """Its last token is always computed, to draw from it."""
        self.cacheable += sum(1 for _ in takewhile(self.computed.__contains__, beginnings(prompt[:-1])))
        self.computed.update(beginnings(prompt))

    def answer(self, tokens: Sequence[int]) -> None:
        """Add a prompt with its answer. The last token was never an input, so it is left out."""
        self.computed.update(beginnings(tokens[:-1]))


def beginnings(tokens: Iterable[int]) -> Iterable[int]:
    """A hash of each."""
    running = 0
    for token in tokens:
        running = hash((running, token))
        yield running


class Clients:
    """Sends requests in waves and counts the cached tokens of their prompts."""

    def __init__(self, engine: aengine.Engine, many: int) -> None:
        self.many = many
        self.rng = random.Random(1)
        self.seen = Seen()
        self._engine = engine

    async def wave(self, prompts: Sequence[list[int]], said: tuple[int, int], n: int = 1) -> list[list[int]]:
        """Send all requests at once. Returns each prompt followed by each of its answers."""

        async def one(prompt: list[int]) -> list[list[int]]:
            self.seen.ask(prompt)
            tokens = self.rng.randint(*said)
            answer = await self._engine.complete(prompt, n=n, max_tokens=tokens, temperature=1, ignore_eos=True)
            self.seen.found += answer.usage.cached_tokens
            return [prompt + list(choice.token_ids) for choice in answer.choices]

        texts = [text for group in await asyncio.gather(*map(one, prompts)) for text in group]
        for text in texts:
            self.seen.answer(text)
        return texts

    def behind(self, texts: Sequence[list[int]], least: int, most: int) -> list[list[int]]:
        """Append new tokens to each sequence."""
        return [text + ids(self.rng, self.rng.randint(least, most)) for text in texts]


async def chats(clients: Clients) -> None:
    texts = [ids(clients.rng, 400)] * 64 * clients.many
    for _ in range(8):
        texts = await clients.wave(clients.behind(texts, 20, 200), (50, 400))


async def agents(clients: Clients) -> None:
    shared = ids(clients.rng, 20_000)
    await clients.wave([shared], (1, 1))
    texts = [shared] * 32 * clients.many
    for _ in range(6):
        texts = await clients.wave(clients.behind(texts, 100, 1_500), (30, 200))


async def forks(clients: Clients) -> None:
    texts = await clients.wave([ids(clients.rng, 3_000) for _ in range(16 * clients.many)], (200, 200), n=8)
    await clients.wave(clients.behind(texts * 2, 20, 200), (50, 400))


WORK: dict[str, Callable[[Clients], Coroutine[None, None, None]]] = {"chats": chats, "agents": agents, "forks": forks}


async def measure(shape: str, work: str, options: argparse.Namespace, report: Report) -> None:
    many: int = options.many

    def null_runtime(
        config: EngineConfig, folder: Path, model: ModelConfig, wait_for_text: Callable[[], object]
    ) -> Runtime:
        """The pool that the shape has on one H200, no weights."""
        pool = size_pool(config, model, torch.bfloat16, int(config.kv_cache_gib * 2**30), dtype=torch.bfloat16)
        choice = ProposerChoice("by chance", "", options.drafts, lambda parts: None) if options.drafts else NO_PROPOSER
        return Runtime(RandomRunner(options.right), model, pool, 8192, speculation=choice)

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape, context=CONTEXT)
        config = EngineConfig(model=folder, load_format="dummy", kv_cache_gib=POOL_GIB[shape])
        async with aengine.Engine(config=config, start=null_runtime) as engine:
            clients = Clients(engine, many)
            await WORK[work](clients)
            stats = engine.stats()
            engine.check_integrity()
    seen = clients.seen
    figures = {
        "prompt_tokens": stats.prompt_tokens,
        "cacheable": seen.cacheable,
        "found": seen.found,
        "share": seen.found / seen.cacheable,
    }
    report.tell(
        {"shape": shape, "work": work, "many": many, "drafts": options.drafts}, figures, detail={"stats": str(stats)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(POOL_GIB), default=list(POOL_GIB))
    parser.add_argument("--work", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--many", type=int, default=1, help="times as many users at once, in the same pool")
    parser.add_argument("--drafts", type=int, default=0, help="that each row verifies in a step")
    parser.add_argument("--right", type=float, default=0.7, help="the chance that a draft is kept after a kept one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report("hit_rates", options.out)
    for shape in options.shapes:
        for work in options.work:
            asyncio.run(measure(shape, work, options, report))
    report.print_table()


if __name__ == "__main__":
    main()
