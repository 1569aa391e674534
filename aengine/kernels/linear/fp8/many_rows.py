"""x @ weight.T of FP8 by FP8 for many rows: tensor cores multiply 128 columns, which are scaled and summed in float32.

The tensor memory accelerator copies tiles, through descriptors that the host makes for each launch. A residual is added
at the end.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8.quantize import GROUP, KernelScales
from aengine.kernels.linear.weights.fp8 import Activations
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["m"])
def _many_rows_kernel(
    x_scale_ptr,  # [groups, m], [m] or []
    x_desc,  # [m, K] e4m3
    w_desc,  # [N, K] e4m3
    w_scale_ptr,  # [ceil(N / SCALE_ROWS), groups], or one scale for all groups if not GROUPED
    bias_ptr,  # [N]
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    X_GROUPED: tl.constexpr,
    X_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,  # tiles of rows that are computed together, so that both operands stay in the cache
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = (K + 127) // 128
    WIDE: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, high = tl.program_id(0), tl.cdiv(m, BLOCK_M)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    band = tile // (BAND * WIDE)
    in_band = tile % (BAND * WIDE)
    height = tl.minimum(high - band * BAND, BAND)
    m0 = (band * BAND + in_band % height) * BLOCK_M
    n0 = in_band // height * BLOCK_N
    row, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    used = row < m
    scale_rows = tl.minimum(n, N - 1) // SCALE_ROWS
    ONE_SCALE: tl.constexpr = SCALE_ROWS % BLOCK_N == 0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        x = x_desc.load([m0, group * 128])
        w = w_desc.load([n0, group * 128])
        # Tensor cores add up FP8 with 14 bits, so only 128 columns at a time; the rest is added up in float32.
        part = tl.dot(x, w.T)
        if GROUPED and ONE_SCALE:
            w_scale = tl.load(w_scale_ptr + n0 // SCALE_ROWS * GROUPS + group)
            if X_GROUPED:
                acc += part * (tl.load(x_scale_ptr + group * m + row, mask=used, other=0.0) * w_scale)[:, None]
            else:
                acc += part * w_scale
        else:
            if GROUPED:
                part *= tl.load(w_scale_ptr + scale_rows * GROUPS + group)[None, :]
            if X_GROUPED:
                part *= tl.load(x_scale_ptr + group * m + row, mask=used, other=0.0)[:, None]
            acc += part
    if not GROUPED:
        acc *= tl.load(w_scale_ptr + scale_rows)[None, :]
    if X_TOKEN:
        acc *= tl.load(x_scale_ptr + row, mask=used, other=0.0)[:, None]
    elif not X_GROUPED:
        acc *= tl.load(x_scale_ptr)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = used[:, None] & (n < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + n[None, :]
    if ADD:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class ManyRowsConfig:
    """How a product is cut into tiles."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    band: int = 8

    def shared_memory(self) -> int:
        """Return an upper bound in bytes of the tiles in flight or in use."""
        return self.stages * (self.block_m + self.block_n) * GROUP + 4096


def many_rows(
    x: Tensor,
    x_scale: Tensor,
    activations: Activations,
    weight: Tensor,
    scales: KernelScales,
    config: ManyRowsConfig,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [m, k] e4m3 with its scales (`round_inputs`), weight [n, k] e4m3, k a multiple of 16 -> [m, n] of `dtype`.

    residual [m, n], contiguous, is added and becomes the result.
    """
    (m, k), n = x.shape, weight.shape[0]
    launch = launch_for(x.device)
    out = torch.empty(m, n, dtype=dtype, device=x.device) if residual is None else residual
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    if not tiles:
        return out
    _many_rows_kernel[(tiles,)](
        x_scale,
        TensorDescriptor(x, [m, k], [k, 1], [config.block_m, GROUP]),
        TensorDescriptor(weight, [n, k], [k, 1], [config.block_n, GROUP]),
        scales.scale, x if bias is None else bias, out, out, m,
        N=n, K=k, SCALE_ROWS=scales.rows, GROUPED=scales.grouped, X_GROUPED=activations == "group",
        X_TOKEN=activations == "token", BLOCK_M=config.block_m, BLOCK_N=config.block_n, BAND=config.band,
        STAGES=config.stages, BIAS=bias is not None, ADD=residual is not None, OVERLAP=launch.overlap,
        num_warps=config.warps, launch_pdl=launch.overlap,
    )  # fmt: skip
    return out
