"""What keys and values depend on beside the tokens, as a digest: cached ones of another model are no use."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from aengine.config import EngineConfig

if TYPE_CHECKING:  # torch
    from aengine.model.config import ModelConfig

_BEGINNING = 2**20  # bytes of a weight file that are read: its header, and the first weights


def fingerprint_of(
    folder: Path, config: EngineConfig, model: ModelConfig, dtypes: tuple[str, str], max_model_len: int
) -> bytes:
    """Of a checkpoint as it is loaded: its configuration, its weight files (their names, sizes, times of change and
    beginnings), what it computes in and keeps, and how its keys are rotated where so many positions may come.

    A checkpoint that was written anew is another one, though it may hold the same.
    """
    parts: list[object] = [dtypes, model.ranks, config.page_size, config.quantization, config.load_format]
    parts += [model.far(config.max_model_len or model.max_position_embeddings), model.far(max_model_len)]
    if config.load_format == "dummy":
        parts.append(config.seed)
    digest = sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        facts = path.stat()
        parts.append((path.name, facts.st_size, facts.st_mtime_ns))
        with path.open("rb") as file:
            digest.update(sha256(file.read(_BEGINNING)).digest())
    digest.update(repr(parts).encode())
    return digest.digest()
