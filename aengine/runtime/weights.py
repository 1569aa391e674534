"""The weights of a model on its devices. The weights of another checkpoint can replace them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.config import EngineConfig
from aengine.errors import AengineError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.checkpoint.staging import WeightsDigest
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.heads import load_heads
from aengine.model.loading.load import Placement, load_shards, matching_checkpoint, open_checkpoint


class Weights:
    """The weights of all ranks' decoders."""

    def __init__(
        self,
        decoders: Sequence[Decoder],
        model: ModelConfig,
        progress: bool,
        digest: WeightsDigest | None = None,
        head_digest: WeightsDigest | None = None,
    ) -> None:
        """Args:
        model: The configuration that the decoders were built from.
        progress: Whether to show a progress bar.
        digest: The digest of the loaded weights. None: no digest is computed, now or on a reload.
        head_digest: The digest of a draft head's weights from another folder. A reload does not change the head.
        """
        self._decoders = list(decoders)
        self._model = model
        self._progress = progress
        self._digest = digest
        self._head_digest = head_digest
        self.consistent = True  # False: a failed reload left weights of two checkpoints

    def matching(self, folder: Path, model: ModelConfig) -> Checkpoint:
        """Return the checkpoint in `folder`, whose config.json describes `model`. Reads headers only.

        Raises: WeightsError if it differs from the loaded model. The error names the difference.
        """
        return matching_checkpoint(folder, model, self._model)

    @property
    def digest(self) -> bytes:
        """The digest of the loaded weights, and of a draft head's. Empty if none is computed."""
        digests = [one.result() for one in (self._digest, self._head_digest) if one is not None]
        return digests[0] if len(digests) == 1 else sha256(b"".join(digests)).digest() if digests else b""

    @torch.inference_mode()
    def reload(self, checkpoint: Checkpoint) -> None:
        """Replace the loaded weights by those of a `matching` checkpoint. Blocks. No step may run meanwhile.

        If it raises, `consistent` is False until a call succeeds.
        """
        self.consistent = False
        digest = None if self._digest is None else WeightsDigest()
        devices = [decoder.device for decoder in self._decoders if decoder.device.type == "cuda"]
        with _all_free_memory(devices):
            checkpoint.copy_into([decoder.groups for decoder in self._decoders], self._progress, digest)
            for device in devices:
                torch.cuda.synchronize(device)
        self.consistent, self._digest = True, digest

    def close(self) -> None:
        """Drop the references to the decoders."""
        self._decoders.clear()


def find_defect(config: EngineConfig, files: Path, model: ModelConfig, plain: ModelConfig) -> str:
    """Return why a model with an additional part cannot be loaded. Reads headers of weights.

    Empty if it can, or if the model without the part cannot either.

    files: the folder of the model. plain: the model without the part.
    """
    ranks = 1 if config.tensor_parallel_size == "auto" else config.tensor_parallel_size

    def defect(one: ModelConfig) -> str:
        try:
            one.spread_over(ranks)
            if config.load_format == "auto":
                open_checkpoint(files, Decoder(one, TorchKernels(), TorchAttention()))
        except AengineError as error:
            return str(error)
        return ""

    found = defect(model)
    return "" if found and defect(plain) else found


@contextmanager
def _all_free_memory(devices: Sequence[torch.device]) -> Iterator[None]:
    """Let torch use all free memory of the device within the block, not only its usual share.

    A layer whose format is converted is built before it replaces the loaded layer. With several devices the function
    does nothing: the memory of their steps must stay reserved, because an allocation may wait for another device.
    """
    if len(devices) != 1:
        yield
        return
    [device] = devices
    share = torch.cuda.get_per_process_memory_fraction(device)
    try:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        yield
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share, device)


def load_weights(
    config: EngineConfig,
    folder: Path,
    model: ModelConfig,
    placements: Sequence[Placement],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_positions: int | None,
    head_folder: Path | None,
) -> tuple[list[Decoder], Weights]:
    """Load the decoders of all ranks, and their draft heads. Does blocking I/O.

    max_positions: As in `load_shards`. head_folder: of a draft head whose files are not the model's own. None: there is
    none.
    """
    digest, head_digest = None if config.disk_cache_dir is None else WeightsDigest(), None
    decoders = load_shards(
        folder, model, placements, dtype=dtype, load_format=config.load_format, seed=config.seed,
        progress=config.progress, max_positions=max_positions, kv_dtype=kv_dtype, digest=digest,
    )  # fmt: skip
    if head_folder is not None:
        head_digest = None if digest is None else WeightsDigest()
        load_heads(
            head_folder, decoders, placements,
            load_format=config.load_format, seed=config.seed, progress=config.progress, digest=head_digest,
        )  # fmt: skip
    return decoders, Weights(decoders, model, config.progress, digest, head_digest)
