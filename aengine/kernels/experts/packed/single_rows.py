"""Experts of 4-bit codes for one to a few tokens: every pair is a product of a row with an expert's matrices.

The launches are those of `experts.single_rows`, the product is that of `int4.row`. A program has 16 rows of a matrix or
a multiple of that. Each of its warps multiplies every WARPS-th block of columns. Blocks are loaded before they are
needed.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import activated_columns, row_biases
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.packed.single_product import load_blocks, load_row_blocks, operands, product, row_factors
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.int4.block import Unpacking, unpacking
from aengine.kernels.linear.int4.packed_codes import BLOCK
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _gate_up_kernel(
    x_ptr,  # [tokens, K]
    words_ptr,  # [E * 2 * STRIPS, BLOCKS, 512] int16: gate, then up; without GATED half as many: up
    scales_ptr,  # [groups, ALL_ROWS] int32
    biases_ptr,  # [E, 2 * N or N], BIASES only
    ids_ptr,  # [pairs]
    out_ptr,  # [pairs, N]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,  # blocks of each warp in flight before one is multiplied
    BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    E2M1: tl.constexpr,
    PAIRS: tl.constexpr,  # whether two numbers are 4 bytes, and assembly may be used
    PRESCALED: tl.constexpr,  # the factor of the results
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = PARTS * BLOCK_N
    TURNS: tl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    pair = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    if OVERLAP:
        gdc_wait()
        # Not before the wait: the next kernel starts when all programs have come here, and then reads the ids at once.
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    if (expert >= 0) & (expert < E):
        # Rows after the end read the last ones and are not stored.
        index = tl.arange(0, ROWS // 16)
        strip = tl.minimum(column * (BLOCK_N // 16) + index % (BLOCK_N // 16), STRIPS - 1)
        strip += (expert * PARTS + index // (BLOCK_N // 16)) * STRIPS
        like = tl.zeros([1], x_ptr.dtype.element_ty)
        x_row = x_ptr + (pair // TOP_K).to(tl.int64) * K
        loaded = ()
        for turn in tl.static_range(EARLY):
            at = turn * WARPS
            loaded = loaded + (load_blocks(words_ptr, scales_ptr, strip, at, BLOCKS, ALL_ROWS, GROUP, E2M1, WARPS),)  # noqa: RUF005 (Triton knows no other way)
        x = load_row_blocks(x_row, 0, K, WARPS, PAIRS)
        acc = tl.zeros([WARPS, ROWS, 4], tl.float32)
        for turn in tl.static_range(TURNS):
            if turn + EARLY < TURNS:
                at = (turn + EARLY) * WARPS
                loaded = loaded + (load_blocks(words_ptr, scales_ptr, strip, at, BLOCKS, ALL_ROWS, GROUP, E2M1, WARPS),)  # noqa: RUF005
            words, scales = loaded[turn]
            x0, x1, x2, x3 = operands(x, like, WARPS, PAIRS)
            if turn + 1 < TURNS:
                x = load_row_blocks(x_row, (turn + 1) * WARPS, K, WARPS, PAIRS)
            acc += product(words, scales, x0, x1, x2, x3, ROWS, WARPS, GROUP, E2M1, ASM, BASE, LIFT, PRECISION)
        result = tl.sum(tl.max(acc, axis=2), axis=0)
        if GROUP == 16:
            result *= row_factors(scales_ptr, strip, BLOCKS, ALL_ROWS)
        gate, up = result, result
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(result, (2, BLOCK_N)), (1, 0)))
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        result = activated_columns(gate, up, biases_ptr, expert, n, N, GATED, ALPHA, LIMIT, GELU, BIASES) * PRESCALED
        tl.store(out_ptr + pair.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@keep_variants
@triton.jit
def _down_kernel(
    x_ptr,  # [pairs, K]
    words_ptr,  # [E * STRIPS, BLOCKS, 512] int16
    scales_ptr,  # [groups, ALL_ROWS] int32
    biases_ptr,  # [E, N], BIASES only
    ids_ptr,  # [pairs]
    weights_ptr,  # [pairs]
    residual_ptr,  # [tokens, N], ADD only; may be out_ptr
    out_ptr,  # [tokens, N]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,  # as above, through the experts in order; the first ones are loaded before the wait
    BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    E2M1: tl.constexpr,
    PAIRS: tl.constexpr,
    PRESCALED: tl.constexpr,  # the factor of x
    BIASES: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TURNS: tl.constexpr = (BLOCKS + WARPS - 1) // WARPS  # of each expert
    token = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(column * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), STRIPS - 1)
    if OVERLAP:
        gdc_launch_dependents()
    loaded = ()  # loaded while the kernel before this one ends
    for turn in tl.static_range(EARLY):
        # The kernel that chose the experts is complete: the kernel before this one waited before it released this one.
        # Read past the first-level cache, which may hold another layer's ids.
        expert = tl.load(ids_ptr + token * TOP_K + turn // TURNS, cache_modifier=".cg")
        strip = own + tl.where((expert >= 0) & (expert < E), expert, 0) * STRIPS
        at = turn % TURNS * WARPS
        loaded = loaded + (load_blocks(words_ptr, scales_ptr, strip, at, BLOCKS, ALL_ROWS, GROUP, E2M1, WARPS),)  # noqa: RUF005 (Triton knows no other way)
    if OVERLAP:
        gdc_wait()
    like = tl.zeros([1], x_ptr.dtype.element_ty)
    total = tl.zeros([WARPS, BLOCK_N, 4], tl.float32)
    result = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        result = tl.load(residual_ptr + token.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    x_rows = x_ptr + token.to(tl.int64) * (TOP_K * K)
    x = load_row_blocks(x_rows, 0, K, WARPS, PAIRS)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j, cache_modifier=".cg")
        known = (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + token * TOP_K + j)
        acc = tl.zeros([WARPS, BLOCK_N, 4], tl.float32)
        for turn in tl.static_range(TURNS):
            if j * TURNS + turn + EARLY < TOP_K * TURNS:
                later = tl.load(ids_ptr + token * TOP_K + (j * TURNS + turn + EARLY) // TURNS, cache_modifier=".cg")
                strip = own + tl.where((later >= 0) & (later < E), later, 0) * STRIPS
                at = (turn + EARLY) % TURNS * WARPS
                loaded = loaded + (load_blocks(words_ptr, scales_ptr, strip, at, BLOCKS, ALL_ROWS, GROUP, E2M1, WARPS),)  # noqa: RUF005
            words, scales = loaded[j * TURNS + turn]
            x0, x1, x2, x3 = operands(x, like, WARPS, PAIRS)
            if j * TURNS + turn + 1 < TOP_K * TURNS:
                x = load_row_blocks(
                    x_rows + (j * TURNS + turn + 1) // TURNS * K, (turn + 1) % TURNS * WARPS, K, WARPS, PAIRS
                )
            acc += product(words, scales, x0, x1, x2, x3, BLOCK_N, WARPS, GROUP, E2M1, ASM, BASE, LIFT, PRECISION)
        if GROUP == 16:
            strip = own + tl.where(known, expert, 0) * STRIPS
            acc *= row_factors(scales_ptr, strip, BLOCKS, ALL_ROWS)[None, :, None]
        # The product of a missing expert may be NaN, because its input was never written.
        total += tl.where(known, acc * weight, 0.0)
        if BIASES:
            result += tl.where(known, row_biases(biases_ptr, tl.where(known, expert, 0), n, N) * weight, 0.0)
    result += tl.sum(tl.max(total, axis=2), axis=0) / PRESCALED  # all columns are equal
    tl.store(out_ptr + token.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@dataclass(frozen=True, slots=True)
class PackedSingleCut:
    """How one of the two products is divided.

    block_n: columns of the result; up has twice as many if there is no gate. early: blocks of each warp in flight, at
    least 1. registers: of a thread at most; 0: no limit.
    """

    block_n: int
    warps: int
    early: int = 1
    registers: int = 0


@dataclass(frozen=True, slots=True)
class PackedSingleConfig:
    """How products with single rows are divided among programs."""

    gate_up: PackedSingleCut
    down: PackedSingleCut


def fits_single_rows(weight: PackedMatrices) -> bool:
    """Return whether a block of columns has one word of scales for each row, or of NVFP4 two."""
    return weight.columns % 2 == 0 and (weight.e2m1 or weight.group >= BLOCK)


def packed_single_rows(
    h: Tensor, gate_up: PackedMatrices, down: PackedMatrices, ids: Tensor, weights: Tensor, residual: Tensor | None,
    experts: int, config: PackedSingleConfig, rule: ExpertRule,
) -> Tensor:  # fmt: skip
    """Compute `Experts.add_to` of contiguous tensors, for few tokens.

    gate_up is of [E, 2 * inter, hidden] or, without a gate, of [E, inter, hidden]; down is of [E, hidden, inter]. Both
    must fit.
    """
    tokens, top_k = ids.shape
    overlap = launch_for(h.device).overlap
    precision = "ieee" if h.element_size() > 2 else "tf32"
    inner = h.new_empty(tokens * top_k, gate_up.rows)
    out = torch.empty_like(h) if residual is None else residual
    gate_up_bias, down_bias = rule.pointers(h)
    prescaled = 2.0**64 if _bare(h, down) else 1.0
    cut, how = config.gate_up, _unpacking(h, gate_up)
    block_n = cut.block_n * 2 // rule.parts
    turns = -(-gate_up.words.shape[1] // cut.warps)
    _gate_up_kernel[(tokens * top_k * -(-gate_up.rows // block_n),)](
        h, gate_up.words, gate_up.scales, gate_up_bias, ids, inner,
        E=experts, N=gate_up.rows, K=gate_up.columns, TOP_K=top_k, BLOCK_N=block_n, WARPS=cut.warps,
        EARLY=min(cut.early, turns), **gate_up.constants, PAIRS=bool(how.assembly), PRESCALED=prescaled,
        GATED=rule.gated, **rule.gate_up, ASM=how.assembly, BASE=how.base, LIFT=how.lift, PRECISION=precision,
        OVERLAP=overlap, num_warps=cut.warps, maxnreg=cut.registers or None, launch_pdl=overlap,
    )  # fmt: skip
    cut, how = config.down, _unpacking(h, down)
    turns = -(-down.words.shape[1] // cut.warps)
    _down_kernel[(tokens * -(-down.rows // cut.block_n),)](
        inner, down.words, down.scales, down_bias, ids, weights, out, out,
        E=experts, N=down.rows, K=down.columns, TOP_K=top_k, BLOCK_N=cut.block_n, WARPS=cut.warps,
        EARLY=min(cut.early, top_k * turns), **down.constants, PAIRS=bool(how.assembly), PRESCALED=prescaled,
        **rule.down, ADD=residual is not None, ASM=how.assembly, BASE=how.base, LIFT=how.lift, PRECISION=precision,
        OVERLAP=overlap, num_warps=cut.warps, maxnreg=cut.registers or None, launch_pdl=overlap,
    )  # fmt: skip
    return out


def _bare(x: Tensor, weight: PackedMatrices) -> bool:
    """Return whether codes are multiplied without their power of two.

    Tensor cores are exact below 2 ** -126, and their sums there have steps of 2 ** -23 of the true value. That is
    enough for a normed row. The input of down may be smaller, so it is multiplied by a power of two before it is
    stored.
    """
    return (weight.bare or weight.nvfp4) and x.dtype == torch.bfloat16


def _unpacking(x: Tensor, weight: PackedMatrices) -> Unpacking:
    """Return how codes become numbers; on a CPU without assembly."""
    dtype = x.dtype if x.device.type != "cpu" else torch.float32
    return unpacking(dtype, weight.e2m1, weight.group, False, _bare(x, weight))
