"""Prompts with common prefixes, and the outputs of transformers and of engines for them."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import torch

import aengine
from aengine.model.loading.hub import DEMO
from tests.model.checkpoints import write_checkpoint

GREEDY = {"temperature": 0, "ignore_eos": True}


class ManyPrompts:
    """Twenty prompts that begin with parts of `shared`, and the number of tokens to draw for each.

    longest: the most tokens to draw.
    """

    def __init__(self, seed: int, longest: int = 90) -> None:
        self.rng = random.Random(seed)
        self.shared = self.ids(200)
        self.prompts = [self.shared[: self.rng.randrange(200)] + self.ids(self.rng.randint(1, 90)) for _ in range(20)]
        self.lengths = [self.rng.randint(1, longest) for _ in self.prompts]

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(300, 4000) for _ in range(count)]

    def write(self, case: str, folder: Path, **options: object) -> list[tuple[int, ...]]:
        """Write a checkpoint with the demo model's tokenizer.

        Returns the ids that transformers draws for each prompt.
        """
        model = write_checkpoint(case, folder, **options)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder)
        drawn = []
        for prompt, count in zip(self.prompts, self.lengths):
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            drawn.append(tuple(out[0, len(prompt) :].tolist()))
        return drawn

    async def complete(self, engine: aengine.Engine) -> list[tuple[int, ...]]:
        """Return the ids that an engine draws for all prompts at once."""
        completions = await asyncio.gather(
            *(engine.complete(prompt, max_tokens=count, **GREEDY) for prompt, count in zip(self.prompts, self.lengths))
        )
        engine.check_integrity()
        return [completion.token_ids for completion in completions]
