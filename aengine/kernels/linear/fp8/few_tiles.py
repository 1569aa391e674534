"""x @ weight.T of FP8 by FP8 with fewer tiles than processors: two groups of 128 columns a step, K split.

While tensor cores multiply every second group, the sums of the group before it are scaled and added up in float32. If
there are two or more processors for each tile, they share its columns. The last one adds the parts up in order.
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
from aengine.kernels.linear.finish import finish
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.parts import Parts
from aengine.kernels.variants import keep_variants


@triton.jit
def _settled(acc, OVERLAP: tl.constexpr):
    """Return acc, computed before the code that follows. Otherwise the next product could not use its operands'
    registers.
    """
    if OVERLAP:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@keep_variants
@triton.jit(do_not_specialize=["m"])
def _few_tiles_kernel(
    x_scale_ptr,  # [groups, m]
    x_desc,  # [m, K] e4m3
    w_desc,  # [N, K] e4m3
    w_scale_ptr,  # [ceil(N / 128), groups]
    bias_ptr,  # [N]
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] float32
    arrived_ptr,  # [tiles] int32, zero between launches
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 128
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = K // 128
    PIECE: tl.constexpr = GROUPS // SPLITS
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    high = tl.cdiv(m, BLOCK_M)
    m0, n0 = tile % high * BLOCK_M, tile // high * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    used = m0 + row < m
    x_scales = x_scale_ptr + m0 + row
    w_scales = w_scale_ptr + n0 // 128 * GROUPS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second_scale = tl.zeros([BLOCK_M], tl.float32)
    for group in tl.range(split * PIECE, split * PIECE + PIECE, 2, num_stages=STAGES):
        x = x_desc.load([m0, group * 128])
        w = w_desc.load([n0, group * 128])
        # Tensor cores add up FP8 with 14 bits, so only 128 columns at a time; the rest is added up in float32.
        first = tl.dot(x, w.T)
        acc = _settled(acc + second * second_scale[:, None], OVERLAP)
        x = x_desc.load([m0, group * 128 + 128])
        w = w_desc.load([n0, group * 128 + 128])
        second = tl.dot(x, w.T)  # it is not used before the next step
        first_scale = tl.load(x_scales + group * m, mask=used, other=0.0) * tl.load(w_scales + group)
        acc += first * first_scale[:, None]
        second_scale = tl.load(x_scales + (group + 1) * m, mask=used, other=0.0) * tl.load(w_scales + group + 1)
    acc += second * second_scale[:, None]
    column = tl.arange(0, BLOCK_N)
    parts = part_ptr + tile * (SPLITS * BLOCK_M * BLOCK_N) + row[:, None] * BLOCK_N + column[None, :]
    finish(
        acc, bias_ptr, residual_ptr, out_ptr, parts, arrived_ptr, used[:, None], m0 + row, n0 + column, tile, split,
        SPLITS, N, SPLITS > 1, True, BIAS, ADD,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FewTilesConfig:
    """How a product is cut into tiles and along k. splits divide the number of pairs of groups."""

    block_m: int
    block_n: int
    splits: int
    stages: int
    warps: int

    def shared_memory(self) -> int:
        """Return an upper bound in bytes of the tiles in flight or in use."""
        return 2 * self.stages * (self.block_m + self.block_n) * GROUP + 4096


def few_tiles(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    config: FewTilesConfig,
    parts: Parts,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [m, k] e4m3 with scales [k / 128, m], weight [n, k] e4m3 with scales [n / 128, k / 128] -> [m, n].

    k is a multiple of 256. residual [m, n], contiguous, is added and becomes the result.
    """
    (m, k), n = x.shape, weight.shape[0]
    launch = launch_for(x.device)
    out = torch.empty(m, n, dtype=dtype, device=x.device) if residual is None else residual
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    part, arrived = x_scale, x_scale
    if config.splits > 1:
        part, arrived = parts(x.device, tiles * config.splits * config.block_m * config.block_n, tiles)
    _few_tiles_kernel[(tiles * config.splits,)](
        x_scale,
        TensorDescriptor(x, [m, k], [k, 1], [config.block_m, GROUP]),
        TensorDescriptor(weight, [n, k], [k, 1], [config.block_n, GROUP]),
        scale, x if bias is None else bias, out, out, part, arrived, m,
        N=n, K=k, BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLITS=config.splits, STAGES=config.stages,
        BIAS=bias is not None, ADD=residual is not None, OVERLAP=launch.overlap, num_warps=config.warps,
        launch_pdl=launch.overlap,
    )  # fmt: skip
    return out
