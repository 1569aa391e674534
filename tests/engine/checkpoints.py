"""Variants of checkpoints: fewer layers, changed weights, changed fields."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from aengine.model.loading import hub


def first_layers(folder: Path, count: int) -> Path:
    """Write the demo model with only its first layers. Its text makes no sense, but it is faster."""
    shutil.copytree(hub.DEMO, folder)
    weights = folder / "model.safetensors"
    if weights.exists():  # a GPU machine may have no weights
        kept = {
            name: one
            for name, one in load_file(weights).items()
            if not (layer := re.search(r"\.layers\.(\d+)\.", name)) or int(layer[1]) < count
        }
        save_file(kept, weights, {"format": "pt"})
    return with_config(folder, num_hidden_layers=count)


def other_demo(folder: Path, seed: int = 1) -> Path:
    """Write the demo model with noise on its matrices, which changes its outputs."""
    shutil.copytree(hub.DEMO, folder)
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: (one.float() + 0.3 * one.float().std() * torch.randn(one.shape, generator=generator)).to(one.dtype)
        if one.dim() > 1
        else one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_config(folder: Path, **changes: object) -> Path:
    """Change fields of a folder's config.json: those of the language model, if it has them, else the outer ones."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        text = config.get("text_config", config)
        (text if name in text else config)[name] = value
    path.write_text(json.dumps(config))
    return folder


def text_alone(folder: Path) -> Path:
    """Write the demo model as a language model whose files do not mention images."""
    shutil.copytree(hub.DEMO, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    path.write_text(json.dumps(text | {"architectures": ["Qwen3ForCausalLM"]}))
    return folder


def other_numbers(folder: Path, to: Path, seed: int = 1) -> Path:
    """Copy a checkpoint with noise on all of its tensors, including norms and gates."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: (one + 0.15 * torch.randn(one.shape, generator=generator) * one.std(correction=0).clamp_min(0.05)).to(
            one.dtype
        )
        for name, one in load_file(folder / "model.safetensors").items()
    }
    save_file(changed, to / "model.safetensors", {"format": "pt"})
    return to
