"""Recording what is launched as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE | None) -> Iterator[None]:
    """What is launched on the current stream within becomes `graph`, with memory from `pool`.

    torch's own context manager waits for the device and gives memory back before each graph, which the next rehearsal
    takes again; who records many calls `give_back` where it matters.
    """
    graph.capture_begin(pool=pool)
    try:
        yield
    finally:
        graph.capture_end()


def give_back() -> None:
    """Free what torch keeps for the next who asks, on devices and pinned on the host: it has been used to load weights
    and to try steps of all sizes.
    """
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):  # of torch for CUDA
        torch._C._host_emptyCache()
