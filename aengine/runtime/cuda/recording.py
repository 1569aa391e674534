"""Records launches as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE | None) -> Iterator[None]:
    """Record the launches on the current stream as `graph`, with memory from `pool`.

    `torch.cuda.graph` synchronises and empties torch's caches before each graph. Here the caller does that once for
    many graphs. Other threads may copy pages and adapters to the device during a recording. The garbage collector is
    off, because it could free tensors, and the events of their streams would be recorded.

    If the block raises, the stream and torch's allocator are restored. Memory that the pool has allocated stays there.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    except BaseException:
        _leave(pool)
        raise
    finally:
        if collecting:
            gc.enable()


def _leave(pool: _POOL_HANDLE | None) -> None:
    """Tell torch that a failed recording has ended. Otherwise torch would never free the pool's memory."""
    if pool is not None:
        with suppress(RuntimeError):  # raised if the recording has ended; the graph then owns its memory
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)


class _Bytes:
    """A tensor's memory, described to torch by CUDA's array interface."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def non_owning_view(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor that does not keep its memory alive.

    It is for results of a recorded graph. Later graphs of the same pool may use the same memory. So the view is valid
    until another graph of the pool is replayed.
    """
    if not tensor.is_cuda:
        return tensor
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def empty_caches() -> None:
    """Free the memory that torch caches, on devices and pinned on the host."""
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):  # only torch for CUDA has it
        torch._C._host_emptyCache()
