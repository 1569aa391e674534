"""A digest of everything except tokens that keys and values depend on. It prevents the use of another model's KV."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from aengine.config import EngineConfig

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig


def fingerprint_of(
    folder: Path, config: EngineConfig, model: ModelConfig, weights: bytes, dtypes: tuple[str, str]
) -> bytes:
    """Return the fingerprint of a loaded checkpoint. A copy of the checkpoint has the same fingerprint.

    weights: the digest of all weights that were read. dtypes: of the model, and of keys and values.
    """
    parts: list[object] = [weights, dtypes, model.ranks, config.page_size, config.quantization, config.load_format]
    if config.load_format == "dummy":
        parts.append(config.seed)
    if model.draft_kv_layers:
        parts.append(model.draft_kv_layers)
    parts.append((folder / "config.json").read_bytes())
    return sha256(repr(parts).encode()).digest()
