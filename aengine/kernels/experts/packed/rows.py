"""Experts of 4-bit codes: each tile of rows reads its expert's codes once, and unpacks them on their way.

Plan, tiles and grid are those of `few_rows`, whatever the number of rows. Codes are small numbers that any type holds;
the sums of a group's columns are multiplied by its scale.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.few_rows import FewConfig, FewCut
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.plan import Plan, make_plan
from aengine.kernels.experts.weighted_sum import weighted_sum
from aengine.kernels.launch import launch_for
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _packed_rows_kernel(
    x_ptr,  # GATED: [tokens, K], otherwise [pairs, K]
    words_ptr,  # GATED: [E, 2 * N, K / 4] int16, gate, then up; otherwise [E, N, K / 4]
    scale_ptr,  # [E, 2 * N or N, K / GROUP] float32; MXFP4: uint8 exponents
    zero_ptr,  # the same, uint8; ZEROS only
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # [pairs, N]
    capacity,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    M: tl.constexpr,  # the height of a tile
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    MXFP4: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if tile < tl.load(count_ptr):
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        row = tl.load(tiles_ptr + capacity + tile) + tl.arange(0, M)
        used = row < tl.load(tiles_ptr + 2 * capacity + tile)
        pair = tl.load(order_ptr + row, mask=used, other=0)
        index = tl.arange(0, PARTS * BLOCK_N)
        # Rows past the end read the last row, and are not stored.
        weight_row = tl.minimum(block * BLOCK_N + index % BLOCK_N, N - 1) + index // BLOCK_N * N
        weight_row += expert * (PARTS * N)
        words = words_ptr + weight_row[:, None] * (K // 4) + tl.arange(0, 32)[None, :]
        scales, zeros = scale_ptr + weight_row * (K // GROUP), zero_ptr + weight_row * (K // GROUP)
        x_row = pair // TOP_K if GATED else pair
        x_rows = x_ptr + x_row.to(tl.int64)[:, None] * K + tl.arange(0, 32)[None, :]
        acc = tl.zeros([PARTS * BLOCK_N, M], tl.float32)
        for step in tl.range(0, K, 128, num_stages=STAGES):
            word = tl.load(words + step // 4).to(tl.int32)
            part = tl.zeros([PARTS * BLOCK_N, M], tl.float32)
            for quarter in tl.static_range(4):
                x = tl.load(x_rows + step + 32 * quarter, mask=used[:, None], other=0.0)
                group = (step + 32 * quarter) // GROUP
                zero = tl.full([PARTS * BLOCK_N], MIDDLE, tl.int32)
                if ZEROS:
                    zero = tl.load(zeros + group).to(tl.int32)
                number = _numbers((word >> (4 * quarter)) & 15, zero[:, None], MXFP4).to(x.dtype)
                part = tl.dot(number, tl.trans(x), part, input_precision=PRECISION)
                if (32 * quarter + 32) % GROUP == 0 or quarter == 3:
                    scale = tl.load(scales + group)
                    if MXFP4:
                        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
                    acc += part * scale[:, None]
                    part = tl.zeros([PARTS * BLOCK_N, M], tl.float32)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, M)), (1, 2, 0)))
            acc = gate * tl.sigmoid(gate) * up
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        out = out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=used[None, :] & (n < N)[:, None])


@triton.jit
def _numbers(code, zero, MXFP4: tl.constexpr):
    """Codes int32 -> float32."""
    if MXFP4:
        # Sign, exponent and mantissa where a float32 has them: subnormal where the code is, short of a power of two.
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        number = bits.to(tl.float32, bitcast=True) * 2.0**126
    else:
        # In the mantissa of 2 ** 23, which counts ones.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608).to(tl.float32)
    return number


def packed_rows(
    h: Tensor, gate_up: PackedMatrices, down: PackedMatrices, ids: Tensor, weights: Tensor, residual: Tensor | None,
    config: FewConfig,
) -> Tensor:  # fmt: skip
    """h [tokens, hidden], gate_up of [E, 2 * inter, hidden], down of [E, hidden, inter], ids, weights [tokens, k] ->
    the weighted sum [tokens, hidden], added to `residual` in its place if there is one; all contiguous."""
    (experts, hidden, words), pairs, top_k = down.words.shape, ids.numel(), ids.shape[1]
    plan = make_plan(ids, experts, config.height)
    activated, rows = h.new_empty(pairs, 4 * words), h.new_empty(pairs, hidden)
    _launch(h, gate_up, plan, activated, top_k, config.height, config.gate_up, gated=True)
    _launch(activated, down, plan, rows, top_k, config.height, config.down, gated=False)
    return weighted_sum(rows, ids, weights, residual, experts)


def _launch(
    x: Tensor, w: PackedMatrices, plan: Plan, out: Tensor, top_k: int, height: int, cut: FewCut, *, gated: bool
) -> None:
    launch = launch_for(x.device)
    n = out.shape[1]
    _packed_rows_kernel[(plan.capacity * -(-n // cut.block_n),)](
        x, *w.pointers, plan.order, plan.tiles, plan.count, out, plan.capacity,
        N=n, K=x.shape[1], TOP_K=top_k, M=height, BLOCK_N=cut.block_n, STAGES=cut.stages, GATED=gated,
        **w.constants, PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
        num_warps=cut.warps, launch_pdl=launch.overlap,
    )  # fmt: skip
