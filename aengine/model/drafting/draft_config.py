"""Reads the configuration of a draft model."""

from __future__ import annotations

from pathlib import Path

from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.model.config import DraftModel, ModelConfig


def read_draft_model(folder: Path, target: ModelConfig) -> DraftModel:
    """Read config.json in a folder.

    Raises `UnsupportedModelError` for a model that cannot draft, and `CheckpointError` if its vocabulary is not the
    target's, or for values out of range.
    """
    model, source = ModelConfig.from_folder(folder), folder / "config.json"
    if model.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{source}: vocab_size is {model.vocab_size}, that of the model {target.vocab_size}; use a draft model "
            "with the same vocabulary"
        )
    defects = {
        "recurrent layers": bool(model.recurrent),
        "sliding windows": any(window is not None for window in model.windows),
        "attention to latents": model.latents,
        "rope type longrope": any(one.rope is not None and one.rope.type == "longrope" for one in model.attending),
        "no output over the vocabulary": model.head != "vocabulary",
    }
    for what, is_so in defects.items():
        if is_so:
            raise UnsupportedModelError(
                f"{source}: {model.architecture} has {what}, which is not supported in draft models; use a model of "
                "full attention, or speculation ngram"
            )
    return DraftModel(model=model)
