"""Recording what is launched as a CUDA graph."""

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
    """What is launched on the current stream within becomes `graph`, with memory from `pool`.

    torch's own context manager waits for the device and empties torch's caches before each graph; the caller does that
    once for many graphs. Other threads may copy pages and adapters to the device meanwhile. Cycles are not collected:
    events that come with the end of what they hold would be recorded.

    Where it raises, the stream and torch's memory are as they were, but for what of the memory is the pool's by now.
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
    """End what a recording that was not ended well has begun: as long as torch takes it for under way, it gives back
    no memory, and none of a pool that it counts as in use.
    """
    if pool is not None:
        with suppress(RuntimeError):  # torch knows of none that is under way: it was ended, and the rest is the graph's
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)


class _Bytes:
    """Memory of a CUDA device, as other libraries describe it to torch."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def non_owning_view(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor that does not keep its memory.

    For results of a recorded graph: later graphs of the same pool may be recorded over them. They are valid until one
    of those is replayed.
    """
    if not tensor.is_cuda:
        return tensor
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def empty_caches() -> None:
    """Free the memory that torch caches, on devices and pinned on the host."""
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):  # of torch for CUDA
        torch._C._host_emptyCache()
