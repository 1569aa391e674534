"""Checkpoints of the demo model's shape with other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from aengine.model.hub import DEMO


def other_demo(folder: Path, seed: int = 1) -> Path:
    """The demo model with noise on its matrices: the same sentences go on in other words."""
    shutil.copytree(DEMO, folder)
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
    """Change fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder
