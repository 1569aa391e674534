"""Sums beside other work: what a rank has begun on a side stream, and finishes where it goes on."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import lru_cache

import torch
from torch import Tensor

from aengine.errors import DeviceLostError
from aengine.kernels.collective.base import SumUnderWay
from aengine.kernels.collective.two_parts import sum_two_parts
from aengine.kernels.linear.base import Norm


class Added:
    """A sum that the side stream adds up itself."""

    def __init__(self, part: Tensor, residual: Tensor, done: torch.cuda.Event, queue: deque[SumUnderWay]) -> None:
        """done: recorded behind the sum. queue: of all that are under way, which this joins."""
        self.tokens = len(residual)
        self._part = part  # is read until then
        self._place = residual.data_ptr()
        self._done = done
        self._queue = queue
        queue.append(self)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        self._arrive(residual)
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))

    def _arrive(self, residual: Tensor) -> None:
        if self._queue.popleft() is not self or residual.data_ptr() != self._place:
            raise RuntimeError("sums are finished in the order in which they were begun, where they were begun")
        torch.cuda.current_stream(residual.device).wait_event(self._done)


class Exchanged(Added):
    """A sum of two ranks' parts, of which each has sent the other its own: added up when it is finished."""

    def __init__(
        self,
        part: Tensor,
        residual: Tensor,
        done: torch.cuda.Event,
        queue: deque[SumUnderWay],
        other: Tensor,
        first: bool,
    ) -> None:
        """other: the other rank's part, on this device; first: this rank is the first one."""
        super().__init__(part, residual, done, queue)
        self._parts = (part, other) if first else (other, part)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        self._arrive(residual)
        if norm is not None and norm.weight.dtype == residual.dtype:
            sum_two_parts(*self._parts, residual, norm, normed)
            return
        sum_two_parts(*self._parts, residual)
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))


def copy_across(source: Tensor, target: Tensor) -> None:
    """Have a copy engine copy the bytes to another device, on the current stream of the source's.

    torch would have that stream wait for the other device's, which no graph can hold.
    """
    stream = torch.cuda.current_stream(source.device).cuda_stream
    size = source.numel() * source.element_size()
    if code := _cuda().cuMemcpyAsync(target.data_ptr(), source.data_ptr(), size, stream):
        raise DeviceLostError(f"{source.device} copies nothing to {target.device}: CUDA error {code}")


@lru_cache
def _cuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library
