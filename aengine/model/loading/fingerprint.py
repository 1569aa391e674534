"""What keys and values depend on beside the tokens, as a digest: cached ones of another model are no use."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from aengine.config import EngineConfig

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig


def fingerprint_of(
    folder: Path, config: EngineConfig, model: ModelConfig, weights: bytes, dtypes: tuple[str, str], max_model_len: int
) -> bytes:
    """Return the fingerprint of a checkpoint as it is loaded: of its configuration, its weights, what it computes in
    and keeps, and how its keys are rotated where so many positions may come.

    weights: the digest of all that was read of them. A copy of the checkpoint has the same fingerprint.
    """
    parts: list[object] = [weights, dtypes, model.ranks, config.page_size, config.quantization, config.load_format]
    parts += [model.far(config.max_model_len or model.max_position_embeddings), model.far(max_model_len)]
    if config.load_format == "dummy":
        parts.append(config.seed)
    parts.append((folder / "config.json").read_bytes())
    return sha256(repr(parts).encode()).digest()
