"""The weights of a model on its device, which those of another checkpoint can take the place of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from aengine.model.checkpoint.staging import WeightsDigest
from aengine.model.checkpoint.weights import Checkpoint
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.load import matching_checkpoint


class Weights:
    """The decoders of all ranks."""

    def __init__(
        self,
        decoders: Sequence[Decoder],
        model: ModelConfig,
        progress: bool,
        digest: WeightsDigest | None = None,
    ) -> None:
        """model: what the decoders were built of; progress: whether a bar is shown.

        digest: of the weights that are there. None: it is not wanted, of others that are read either.
        """
        self._decoders = list(decoders)
        self._model = model
        self._progress = progress
        self._digest = digest
        self.whole = True  # False: some are of one checkpoint, some of another

    def matching(self, folder: Path, model: ModelConfig) -> Checkpoint:
        """The weights in `folder`, whose config.json describes `model`. Reads headers only.

        Raises `WeightsError`, naming what differs from the model that is loaded.
        """
        return matching_checkpoint(folder, model, self._model)

    @property
    def digest(self) -> bytes:
        """Of the weights that are there; empty if it is not wanted."""
        return b"" if self._digest is None else self._digest.result()

    @torch.inference_mode()
    def reload(self, checkpoint: Checkpoint) -> None:
        """Read a `matching` checkpoint over the weights that are there. Blocks; nothing may run on the device.

        Where it raises, `whole` is False until a call succeeds.
        """
        self.whole = False
        digest = None if self._digest is None else WeightsDigest()
        devices = [decoder.device for decoder in self._decoders if decoder.device.type == "cuda"]
        with _all_free_memory(devices):
            checkpoint.copy_into([decoder.groups for decoder in self._decoders], self._progress, digest)
            for device in devices:
                torch.cuda.synchronize(device)
        self.whole, self._digest = True, digest

    def close(self) -> None:
        """Let go of them."""
        self._decoders.clear()


@contextmanager
def _all_free_memory(devices: Sequence[torch.device]) -> Iterator[None]:
    """Within, torch may take what is free on a device beyond the share that it has while steps run: a layer of a format
    that is converted is made beside the one that is there.

    Not of several: what their steps need is to stay where it is, as one may wait for another while it takes memory.
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
