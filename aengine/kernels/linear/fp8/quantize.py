"""Matrices in FP8 (e4m3) with a float32 scale for each block: made from floats, and as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.weights.fp8 import Fp8Weight

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
GROUP = 128  # columns that share a scale

_SLAB = 2**24  # elements that are quantised at once: 64 MB in float32


def quantize_fp8(weight: Tensor, block: tuple[int, int] = (GROUP, GROUP)) -> tuple[Tensor, Tensor]:
    """Quantise a matrix [n, k] of any float type -> e4m3 values [n, k], scales [ceil(n / rows), ceil(k / columns)].

    The largest value of each block becomes 448. Works on the weight's device, on a slab of rows at a time.
    """
    n, k = weight.shape
    rows, columns = min(block[0], n), min(block[1], k)
    values = torch.empty(n, k, dtype=E4M3, device=weight.device)
    scale = torch.zeros(-(-n // rows), -(-k // columns), device=weight.device)  # the largest magnitudes, at first
    for start, end in _slabs(n, k, rows):
        part = scale[start // rows : -(-end // rows)]
        torch.maximum(part, _largest(weight[start:end], rows, columns, scale.shape[1]), out=part)
    scale = torch.where(scale > 0, scale / LARGEST, 1.0)
    for start, end in _slabs(n, k, rows):
        part = scale[start // rows : -(-end // rows)]
        scaled = weight[start:end].float() / _spread(part, (rows, columns), end - start, k)
        values[start:end] = scaled.clamp_(-LARGEST, LARGEST).to(E4M3)
    return values, scale


def _slabs(n: int, k: int, rows: int) -> list[tuple[int, int]]:
    """Return the ranges of rows of the slabs. A slab has whole blocks, unless a block is larger."""
    step = max(1, _SLAB // k)
    step -= step % rows if step > rows else 0
    if rows > step:  # a block has several slabs
        return [(s, min(s + step, b, n)) for b in range(rows, n + rows, rows) for s in range(b - rows, min(b, n), step)]
    return [(start, min(start + step, n)) for start in range(0, n, step)]


def _largest(slab: Tensor, rows: int, columns: int, across: int) -> Tensor:
    """Return the largest magnitude of each block [ceil(slab rows / rows), across]."""
    rows = min(rows, len(slab))
    height = -(-len(slab) // rows)
    padded = F.pad(slab.float().abs(), (0, across * columns - slab.shape[1], 0, height * rows - len(slab)))
    return padded.view(height, rows, across, columns).amax(dim=(1, 3))


def _spread(scale: Tensor, block: tuple[int, int], n: int, k: int) -> Tensor:
    """Expand scales of blocks [rows, columns] to elements, [n, k] or a shape that broadcasts to it."""
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(block[1], 1)[:, :k]
    return scale.repeat_interleave(block[0], 0)[:n] if len(scale) > 1 else scale


@dataclass(frozen=True, slots=True)
class KernelScales:
    """The scales of a weight [n, k]. rows: the number that shares scales; grouped: each 128 columns have a scale."""

    scale: Tensor  # [ceil(n / rows), ceil(k / 128)], or [ceil(n / rows), 1] if not grouped
    rows: int
    grouped: bool


def kernel_scales(weight: Fp8Weight) -> KernelScales:
    """Repeat the scales of blocks wider than 128 columns. Leaves the weight's static scale of inputs out."""
    k = weight.weight.shape[1]
    scale = weight.scale
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(weight.block[1] // GROUP, 1)[:, : -(-k // GROUP)]
    return KernelScales(scale.contiguous(), weight.block[0], scale.shape[1] > 1)
