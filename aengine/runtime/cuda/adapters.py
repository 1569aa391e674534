"""Copies adapters to a GPU while steps run. The copies use two pinned buffers and a separate stream."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.model.lora.memory import FactorCopy

BUFFER_BYTES = 8 * 2**20  # each; small, because a step's uploads may have to wait for such a copy


class DeviceFiller:
    """`Filler` of one GPU. It fills one buffer while the device copies the other."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """stream: a stream of the device that only this object uses."""
        self._stream = stream
        self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        with torch.cuda.device(device):
            self._emptied = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._current = self._used = 0

    def fill(self, filling: FactorCopy) -> None:
        into, values = filling.into, filling.values
        rows, columns = values.shape
        with torch.cuda.stream(self._stream):
            into[rows:].zero_()
            row_bytes = into.shape[1] * into.element_size()
            each = max(1, BUFFER_BYTES // row_bytes)
            for first in range(0, rows, each):
                part = values[first : first + each]
                place = self._take(len(part) * row_bytes).view(into.dtype).view(len(part), -1)
                place[:, columns:].zero_()
                place[:, :columns].copy_(part)
                into[first : first + len(part)].copy_(place, non_blocking=True)

    def wait(self) -> None:
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()
        self._used = 0

    def _take(self, nbytes: int) -> Tensor:
        """Return `nbytes` unused bytes of a buffer. May wait until a buffer's copies are complete.

        Raises: ValueError if the buffers are too small.
        """
        if nbytes > BUFFER_BYTES:
            raise ValueError(f"a row of {nbytes} bytes does not fit into a buffer")
        if self._used + nbytes > BUFFER_BYTES:
            self._emptied[self._current].record(self._stream)
            self._current, self._used = 1 - self._current, 0
            self._emptied[self._current].synchronize()
        start, self._used = self._used, -(-(self._used + nbytes) // 16) * 16
        return self._buffers[self._current][start : start + nbytes]
