"""Rounds inputs to FP8, alone or in one pass with the RMS norm or SiLU(gate) * up before it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.fp8.quantize import E4M3, GROUP
from aengine.kernels.linear.weights.fp8 import Activations
from aengine.kernels.variants import keep_variants

FEW_ROWS = 256  # up to here the pass with SiLU is bound by the latency of its loads, and wants more warps


@keep_variants
@triton.jit(do_not_specialize=["m"])
def _round_kernel(
    x_ptr,  # [m, SIZE]; [m, 2 * SIZE] if SILU, gates first
    norm_ptr,  # [SIZE], NORM only
    known_ptr,  # [1] float32: the scale, if neither GROUPED nor TOKEN
    out_ptr,  # [m, SIZE] e4m3
    scale_ptr,  # [ceil(SIZE / 128), m] if GROUPED, [m] if TOKEN
    m,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # groups of 128 columns a program
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    GROUPED: tl.constexpr,
    TOKEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    group = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]  # [WIDTH, 128]
    inside = k < SIZE
    if OVERLAP:
        gdc_launch_dependents()
    if NORM:
        weight = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    dtype = x_ptr.dtype.element_ty
    x_row = x_ptr + row.to(tl.int64) * (2 * SIZE if SILU else SIZE)
    x = tl.load(x_row + k, mask=inside, other=0.0).to(tl.float32)
    # x is rounded to the model's type first, as it is when norm and SiLU are launches of their own.
    if NORM:
        inverse = tl.math.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / SIZE + eps)
        x = ((x * inverse).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    if SILU:
        up = tl.load(x_row + SIZE + k, mask=inside, other=0.0).to(tl.float32)
        x = ((x * tl.sigmoid(x)).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    if GROUPED or TOKEN:
        largest = tl.max(tl.abs(x), axis=1)  # [WIDTH]
        if TOKEN:
            largest = tl.max(largest, axis=0)
        scale = tl.where(largest > 0, largest * (1 / 448.0), 1.0)
        if GROUPED:
            tl.store(scale_ptr + group * m + row, scale, mask=group * 128 < SIZE)
            x = x / scale[:, None]
        else:
            tl.store(scale_ptr + row, scale)
            x = x / scale
    else:
        x = x / tl.load(known_ptr)
    x = tl.clamp(x, -448.0, 448.0)
    tl.store(out_ptr + row.to(tl.int64) * SIZE + k, x.to(tl.float8e4nv), mask=inside)


def round_inputs(
    x: Tensor,
    activations: Activations,
    input_scale: Tensor | None = None,
    *,
    norm: Norm | None = None,
    silu: bool = False,
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """x [m, k], or [m, 2 * k] with silu, gates first -> e4m3 [m, k] and its scales.

    Scales are [ceil(k / 128), m] for groups, [m] for tokens, and `input_scale` [] if it is static. multiple: the number
    of rows is padded to a multiple of it, with undefined contents.
    """
    x = x.contiguous()
    m, k = x.shape
    padded = -(-m // multiple) * multiple
    k = k // 2 if silu else k
    groups = -(-k // GROUP)
    grouped, token = activations == "group", activations == "token"
    out = x.new_empty(padded, k, dtype=E4M3)
    if input_scale is not None:
        scale = input_scale
    else:
        scale = torch.empty((groups, padded) if grouped else (padded,), dtype=torch.float32, device=x.device)
    width = power_of_two(groups)
    if norm is None and not token:  # nothing is computed over whole rows
        width = min(width, 16)
    overlap = launch_for(x.device).overlap
    warps = width // 2 if silu and m <= FEW_ROWS else width // 4
    if m:
        _round_kernel[(m, triton.cdiv(groups, width))](
            x, x if norm is None else norm.weight, scale, out, scale, padded, 0.0 if norm is None else norm.eps,
            SIZE=k, WIDTH=width, NORM=norm is not None, SILU=silu, GROUPED=grouped, TOKEN=token, OVERLAP=overlap,
            num_warps=min(16, max(1, warps)), launch_pdl=overlap,
        )  # fmt: skip
    return out, scale
