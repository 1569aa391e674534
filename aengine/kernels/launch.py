"""What a device offers to the kernels of this folder, and the rules under which they overlap.

On Hopper and later every kernel here is launched as a dependent of the kernel before it: its programs may start while
that one drains. Three rules keep this safe:

- A program waits (`gdc_wait`) before it reads anything that an earlier kernel of the chain wrote and before it writes
  anything, and some program of every launch waits. So "the kernel before me is complete" implies that all kernels
  before that one are. Where another stream joins, the launch itself waits for its event.
- Before the wait only two things are read: weights, and the tensors of the batch (`seq_lens`, `page_table`, ...), which
  must have been written before the last ordinary launch that precedes the layers (the embedding lookup is one).
  A kernel whose predecessor releases it only after its own wait may also read what that one had waited for; and so may
  those behind it, which begin later still.
- A program releases its dependents at once. They may take room on a processor before the last programs of this launch
  get there, so a grid whose programs must spread evenly has to leave no room. But one that reads much besides weights
  behind its wait releases them there: else the weights that they ask for at once stand in front of what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

LIGHT = 2**24  # bytes of a weight: where there are fewer, launches and their ramps count, not the bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """processors: streaming multiprocessors of the device; overlap: whether it knows programmatic dependent launch;
    shared_memory: bytes that one program may have, which is also about what all programs of a processor have together;
    capability: CUDA's version of it, major and minor.
    """

    processors: int
    overlap: bool
    shared_memory: int
    capability: tuple[int, int] = (0, 0)

    @property
    def fp8(self) -> bool:
        """Whether it converts 8-bit floats."""
        return self.capability >= (8, 9)

    @property
    def warp_groups(self) -> bool:
        """Whether four warps may multiply as one, with operands that stay in shared memory."""
        return self.capability[0] == 9


@lru_cache
def launch_for(device: torch.device) -> Launch:
    """A CPU stands for Triton's interpreter: a handful of programs, so that small tests still split their work."""
    if device.type == "cpu":
        return Launch(processors=6, overlap=False, shared_memory=227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return Launch(
        processors=properties.multi_processor_count,
        overlap=properties.major >= 9,
        shared_memory=properties.shared_memory_per_multiprocessor - 1024,  # CUDA keeps 1 KB for each program
        capability=(properties.major, properties.minor),
    )


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def find_borders(kind: Callable[[int], object], most: int) -> list[int]:
    """Return the numbers of rows below `most`, ascending, after which `kind` changes.

    kind: maps a number of rows to everything that its kernels are compiled for. The search takes steps of a 32nd of the
    rows, so it may miss a kind that holds for fewer rows than that.
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
