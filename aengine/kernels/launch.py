"""The properties of a device that kernels depend on, and the rules for overlapping kernels.

On Hopper and later, kernels use programmatic dependent launch: the programs of a kernel may start while the kernel
before it is still running. Three rules keep this safe:

- A program waits (`gdc_wait`) before it writes anything, and before it reads anything that an earlier kernel of the
  chain wrote. In every launch at least one program waits. So if the kernel before is complete, all earlier ones are.
  If another stream joins, the launch itself waits for that stream's event.
- Before the wait, a program reads only weights and the tensors of the batch (`seq_lens`, `page_table`, ...). These must
  be written before the last ordinary launch that precedes the layers; the embedding lookup is one. If a kernel lets the
  next one start only after its own wait, that and later kernels may also read what it waited for.
- A program lets dependents start (`gdc_launch_dependents`) at once. Their programs may occupy a processor before the
  last programs of this launch start. So a grid that must be spread evenly fills every processor. A program that reads
  much more than weights lets dependents start after its wait. Otherwise the dependents' loads of weights would delay
  its reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

LIGHT = 2**24  # bytes of a weight; below this, launching a kernel takes longer than reading the weight


@dataclass(frozen=True, slots=True)
class Launch:
    """The properties of a device that kernels depend on."""

    processors: int  # streaming multiprocessors
    overlap: bool  # whether it supports programmatic dependent launch
    shared_memory: int  # bytes that one program may use; all programs of a processor together have about as much
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability, major and minor

    @property
    def fp8(self) -> bool:
        """Whether it can convert 8-bit floats."""
        return self.capability >= (8, 9)

    @property
    def warp_groups(self) -> bool:
        """Whether four warps can multiply together, with operands in shared memory (wgmma)."""
        return self.capability[0] == 9


@lru_cache
def launch_for(device: torch.device) -> Launch:
    """Return a device's properties. With a CPU's few processors, small tests in Triton's interpreter split work."""
    if device.type == "cpu":
        return Launch(processors=6, overlap=False, shared_memory=227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return Launch(
        processors=properties.multi_processor_count,
        overlap=properties.major >= 9,
        shared_memory=properties.shared_memory_per_multiprocessor - 1024,  # CUDA reserves 1 KB for each program
        capability=(properties.major, properties.minor),
    )


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def find_borders(kind: Callable[[int], object], most: int) -> list[int]:
    """Return the numbers of rows below `most`, ascending, after which `kind` changes.

    kind: maps a number of rows to everything that its kernels are compiled for. The search increases the rows by a 32nd
    each time, so it may miss a kind for a shorter range of rows.
    """
    borders: list[int] = []
    low = 1
    while low < most:
        high = min(low + max(1, low // 32), most)
        borders += _borders_between(kind, low, kind(low), high, kind(high))
        low = high
    return borders


def _borders_between(kind: Callable[[int], object], low: int, of_low: object, high: int, of_high: object) -> list[int]:
    if of_low == of_high:
        return []
    if high - low == 1:
        return [low]
    middle = (low + high) // 2
    of_middle = kind(middle)
    below = _borders_between(kind, low, of_low, middle, of_middle)
    return below + _borders_between(kind, middle, of_middle, high, of_high)
