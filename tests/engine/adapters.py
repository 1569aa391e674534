"""Adapters of the demo model, written by PEFT, and engines that serve them."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import aengine
from aengine.model.loading import hub
from tests.demo_reference import load_demo
from tests.engine.conftest import idle
from tests.model.lora.adapters import write_adapter

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = [400 + number * 7 % 3000 for number in range(40)]


class Written:
    """A folder with adapters `a0`, `a1`, ...; `merged` is the model with the first one merged by PEFT."""

    def __init__(self, folder: Path, count: int) -> None:
        self.base: PreTrainedModel = load_demo(hub.DEMO)
        self.folder = folder
        self.paths = {f"a{number}": str(folder / f"a{number}") for number in range(count)}
        first = folder / "a0"
        self.merged = write_adapter(self.base, first, r=4, lora_alpha=12)
        tensors = load_file(first / "adapter_model.safetensors")
        for number in range(1, count):
            other = folder / f"a{number}"
            shutil.copytree(first, other)
            generator = torch.Generator().manual_seed(number)
            drawn = {
                name: torch.randn(one.shape, generator=generator) * one.std().item() for name, one in tensors.items()
            }
            save_file(drawn, other / "adapter_model.safetensors", {"format": "pt"})

    def refused(self) -> str:
        """Return a folder with an adapter that cannot be applied exactly."""
        folder = self.folder / "refused"
        if not folder.exists():
            shutil.copytree(self.folder / "a0", folder)
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
        return str(folder)

    @staticmethod
    def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
        """Return the ids that transformers draws."""
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


@asynccontextmanager
async def serving(**knobs: Any) -> AsyncIterator[aengine.Engine]:
    """Serve the demo model with these knobs. At the end, check that every page, row and place is accounted for."""
    usual = {"device": "cpu", "max_num_seqs": 32, "kv_cache_gib": 0.1, "progress": False, "torch_threads": 1}
    async with aengine.Engine(**(usual | knobs)) as engine:
        yield engine
        await idle(engine)
