"""inner = A x for a single row, with what comes before it: the norm's weight, or SiLU(gate) * up.

A program owns some rows of A and some columns, all on their way before it waits for the kernel that makes x. Whoever
reads the results adds up the pieces.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _shrink_row_kernel(
    x_ptr,  # [K], or [2 * K] with SILU
    a_ptr,  # [places, R, K]
    norm_ptr,  # [K], NORM only
    inner_ptr,  # [SPLITS, R] float32
    activated_ptr,  # [K], SILU only
    place_ptr,  # [1]
    R: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = k < K
    if OVERLAP:
        gdc_launch_dependents()
    place = tl.load(place_ptr).to(tl.int64)
    a_rows = a_ptr + place * (R * K) + tl.minimum(r, R - 1)[:, None] * K
    a = tl.load(a_rows + k[None, :], mask=inside[None, :], other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    x = tl.load(x_ptr + k, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if SILU:
        up = tl.load(x_ptr + K + k, mask=inside, other=0.0).to(tl.float32)
        wide = (wide * tl.sigmoid(wide)).to(x.dtype).to(tl.float32)
        activated = (wide * up).to(x.dtype)
        if block == 0:
            tl.store(activated_ptr + k, activated, mask=inside)
        wide = activated.to(tl.float32)
    if NORM:
        wide *= norm
    inner = tl.sum(a.to(tl.float32) * wide[None, :], axis=1)
    tl.store(inner_ptr + split * R + r, inner, mask=r < R)


@dataclass(frozen=True, slots=True)
class ShrinkRowConfig:
    """How one shape is cut up."""

    block_r: int
    block_k: int
    warps: int


def shrink_row(
    x: Tensor, a: Tensor, place: Tensor, config: ShrinkRowConfig, norm: Norm | None = None, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """x [1, k], or [1, 2 * k] with silu, a [places, r, k], place int32 [1], all contiguous -> inner, activated.

    inner float32 [splits, r], whose sum over the splits is A x: with silu of SiLU(gate) * up, which is `activated`
    [1, k]; with a norm of x times the norm's weight alone. Without silu `activated` is x.
    """
    _, r, k = a.shape
    overlap = launch_for(x.device).overlap
    splits = -(-k // config.block_k)
    inner = x.new_empty(splits, r, dtype=torch.float32)
    activated = x.new_empty(1, k) if silu else x
    _shrink_row_kernel[(-(-r // config.block_r) * splits,)](
        x, a, x if norm is None else norm.weight, inner, activated, place,
        R=r, K=k, SPLITS=splits, BLOCK_R=config.block_r, BLOCK_K=config.block_k, NORM=norm is not None, SILU=silu,
        OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip
    return inner, activated
