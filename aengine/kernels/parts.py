"""Split work: several programs compute parts of one result. The last program to finish adds the parts up in order.

So a result is deterministic and needs no second launch. `Parts` is the scratch memory; the functions run in kernels.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


class Parts:
    """Scratch memory that launches of one stream at a time share. It never moves, because graphs hold its address."""

    def __init__(self) -> None:
        self._sums: dict[tuple[torch.device, int], Tensor] = {}
        self._arrived: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
        """Return float32 [sums], not initialised, and int32 [counters] of zeros. Every kernel must leave zeros."""
        if (device, sums) not in self._sums:
            self._sums[device, sums] = torch.empty(sums, dtype=torch.float32, device=device)
        if (device, counters) not in self._arrived:
            self._arrived[device, counters] = torch.zeros(counters, dtype=torch.int32, device=device)
        return self._sums[device, sums], self._arrived[device, counters]


@triton.jit
def is_last(arrived_ptr, count):
    """Announce that this program has stored its part, and return whether it is the last of `count` programs.

    The last one sets the counter back to zero. It may then read all parts, but not from the first-level cache.
    """
    tl.debug_barrier()  # every thread's part is stored before one of them announces it
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def sum_parts(parts, SIZE: tl.constexpr, count, mask, UNROLLED: tl.constexpr):
    """Add up `count` parts in order. Returns float32.

    parts: pointers to the elements of the first part. SIZE: elements from one part to the next. UNROLLED: unroll the
    loop; `count` must then be a constant.
    """
    whole = tl.zeros(parts.shape, tl.float32)
    if UNROLLED:
        for other in tl.static_range(count):
            whole += tl.load(parts + other * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        for other in range(count):
            whole += tl.load(parts + other * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    return whole
