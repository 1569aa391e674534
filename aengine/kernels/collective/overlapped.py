"""Sums that overlap with other work. They begin on a side stream and are finished on the main stream."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import ctypes
from collections import deque
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.errors import DeviceLostError
from aengine.kernels.collective.base import PendingSum
from aengine.kernels.launch import power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.variants import keep_variants


class SideStreamSum:
    """A `PendingSum` that is computed on the side stream."""

    def __init__(self, part: Tensor, residual: Tensor, done: torch.cuda.Event, pending: deque[PendingSum]) -> None:
        """done: recorded after the sum. pending: all sums that are not finished; this one is appended."""
        self.tokens = len(residual)
        self._part = part  # kept alive: the side stream reads it
        self._place = residual.data_ptr()
        self._done = done
        self._pending = pending
        pending.append(self)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        self._wait(residual)
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))

    def _wait(self, residual: Tensor) -> None:
        if self._pending.popleft() is not self or residual.data_ptr() != self._place:
            raise RuntimeError("sums must be finished in the order in which they began, with the same residual")
        torch.cuda.current_stream(residual.device).wait_event(self._done)


class CopiedSum(SideStreamSum):
    """A `PendingSum` of two ranks that copy their parts to each other on the side stream. `finish` adds them up."""

    def __init__(
        self,
        part: Tensor,
        residual: Tensor,
        done: torch.cuda.Event,
        pending: deque[PendingSum],
        other: Tensor,
        first: bool,
    ) -> None:
        """other: the other rank's part, on this device. first: whether this is rank 0."""
        super().__init__(part, residual, done, pending)
        self._parts = (part, other) if first else (other, part)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        self._wait(residual)
        if norm is not None and norm.is_rms and norm.weight.dtype == residual.dtype:
            sum_two_parts(*self._parts, residual, norm, normed)
            return
        sum_two_parts(*self._parts, residual)
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))


def copy_across(source: Tensor, target: Tensor) -> None:
    """Copy source's bytes to another device by a copy engine, on the current stream of source's device.

    torch's copy would make that stream wait for the other device's stream, which a graph cannot capture.
    """
    stream = torch.cuda.current_stream(source.device).cuda_stream
    size = source.numel() * source.element_size()
    if code := _cuda().cuMemcpyAsync(target.data_ptr(), source.data_ptr(), size, stream):
        raise DeviceLostError(f"{source.device} cannot copy to {target.device}: CUDA error {code}")


@lru_cache
def _cuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


@keep_variants
@triton.jit
def _two_parts_kernel(
    first_ptr,  # [tokens, SIZE]
    second_ptr,  # the same
    residual_ptr,  # the same; the sum replaces it
    weight_ptr,  # [SIZE], or None without a norm
    normed_ptr,  # [tokens, SIZE], or None
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(first_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(second_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(dtype)
    tl.store(residual_ptr + offsets, rounded, mask=inside)
    if weight_ptr is not None:  # like elementwise.py
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        wide = rounded.to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        tl.store(normed_ptr + offsets, ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


def sum_two_parts(
    first: Tensor, second: Tensor, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None
) -> None:
    """Set residual += first + second, rounded once, and normed = norm(residual) in one pass over memory.

    All are [tokens, hidden], contiguous and of one dtype.
    """
    tokens, size = residual.shape
    block = power_of_two(size)
    if tokens:
        _two_parts_kernel[(tokens,)](
            first, second, residual, None if norm is None else norm.weight, normed, 0.0 if norm is None else norm.eps,
            SIZE=size, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
