"""Memory for images on a device: embeddings that are kept, and pinned memory from which pixels are copied."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.model.images.resizing import ImagePlan
from aengine.sampling.upload import upload

KEPT_BYTES = 2**28  # of embeddings, or more for the largest image; a chunk that needs dropped ones computes them again


def largest_image(config: EngineConfig, model: ModelConfig) -> ImagePlan | None:
    """Return a plan with at least as many tokens as any image of a prompt. None: the model takes no images."""
    longest = config.max_model_len or model.max_position_embeddings
    # A prompt with an image is shorter than the context.
    return None if model.tower is None else model.tower.rule.largest(longest - 1)


class KeptEmbeddings:
    """The embeddings of the images that were computed last. They are in one buffer, and new ones replace older ones."""

    def __init__(self, largest: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """largest: tokens of the largest image. width: values of each token."""
        tokens = max(KEPT_BYTES // (width * dtype.itemsize), largest)
        self._buffer = torch.empty((tokens, width), dtype=dtype, device=device)
        self._next = 0  # the first row for the next image
        self._rows: dict[int, range] = {}  # of each image, by its key

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def get(self, key: int) -> Tensor:
        """Return the embeddings of an image, [tokens, width]. They are valid until the next `put`."""
        rows = self._rows[key]
        return self._buffer[rows.start : rows.stop]

    def put(self, key: int, embeddings: Tensor) -> None:
        """Copy the embeddings of an image, [tokens, width], unless they are larger than the buffer."""
        count = len(embeddings)
        if count > len(self._buffer):
            return
        first = self._next if self._next + count <= len(self._buffer) else 0
        self._next = first + count
        for other, rows in list(self._rows.items()):
            if rows.start < self._next and first < rows.stop:
                del self._rows[other]
        self._rows[key] = range(first, self._next)
        self._buffer[first : self._next] = embeddings

    def clear(self) -> None:
        """Drop all embeddings."""
        self._rows.clear()


class PixelUploads:
    """Copies pixels to a device without waiting for it. Allocating pinned memory may wait, so it is allocated once."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """nbytes: how much one step copies from memory that is allocated now. More than that is allocated later."""
        self._device = device
        # Two steps can be in flight. The next one is launched after the older of them was committed.
        shape, pinned = (2, nbytes if device.type == "cuda" else 0), device.type == "cuda"
        self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        self._step = -1
        self._used = 0

    def upload(self, pixels: bytes, step: int) -> Tensor:
        """Return pixels on the device, uint8. step: the number of the step that needs them."""
        if step != self._step:
            self._step, self._used = step, 0
        source, first = np.frombuffer(pixels, np.uint8), self._used
        if first + len(source) > self._pinned.shape[1]:
            return upload(source.copy(), self._device)
        self._used += len(source)
        part = self._pinned[step % 2, first : self._used]
        part.numpy()[:] = source
        return part.to(self._device, non_blocking=True)
