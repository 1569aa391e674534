"""Which checkpoints can take the place of one that is loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import WeightsError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import checkpoint_of

_OF_THE_DEVICE = ("ranks", "lora", "unpacked_copies")  # rather than of the checkpoint
_CONVERTED = ("dtype",)  # while weights are read


def matching_checkpoint(folder: Path, model: ModelConfig, loaded: ModelConfig) -> Checkpoint:
    """The weights in `folder`, whose config.json describes `model`, where they fit what is loaded. Reads headers only.

    Raises `WeightsError`, naming the first thing that differs, and as `Checkpoint` does.
    """
    for name in model.__struct_fields__:
        old, new = getattr(loaded, name), getattr(model, name)
        if name not in (*_OF_THE_DEVICE, *_CONVERTED) and old != new:
            raise WeightsError(
                f"{folder / 'config.json'}: {name} is {_shown(new)}, that of the loaded model {_shown(old)}; weights "
                f"are reloaded for the same model alone, another one needs another engine"
            )
    plain = msgspec.structs.replace(loaded, lora=None)
    return checkpoint_of(folder, Decoder(plain, TorchKernels(), TorchAttention()))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
