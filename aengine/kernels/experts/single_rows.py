"""Experts for one to a few tokens: a pair of a token and an expert is a row times that expert's matrices.

Nothing is sorted, and there are two launches. The first computes the activation of all pairs. The second computes
down; a program has the same rows of all of a token's experts, so that it adds them up. If two tokens share an expert,
its weights are read twice, the second time mostly from the second-level cache. An expert that all tokens pass is
computed in the same launches. In the first it has its own programs; in the second it is cut into one piece for each of
a token's experts.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import activated_columns, row_biases
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.rule import SILU, ExpertRule
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.columns import evens, in_words, load_columns, odds, products
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _gate_up_kernel(
    x_ptr,  # [tokens, K]
    w_ptr,  # [E, 2 * N, K]: gate, then up; without GATED [E, N, K]: up
    scale_ptr,  # [E, SCALE_COUNT, K / 128], or one scale for all of K if not GROUPED; if SCALE_ROWS
    biases_ptr,  # [E, 2 * N or N], BIASES only
    ids_ptr,  # [pairs]
    out_ptr,  # [pairs, N]
    shared_ptr,  # [2 * SHARED, K]: gate, then up; this and the next are for SHARED only, which is GATED
    shared_out_ptr,  # [tokens, SHARED]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of columns in flight
    WORDS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # rows of a matrix that share scales; 0: there are none
    SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr,  # scales are of 128 columns
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    SHARED: tl.constexpr,  # the inner width of the shared expert; 0: there is none
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    routed: tl.constexpr = TOP_K * blocks  # a token's programs for its experts, which come first
    programs: tl.constexpr = routed + (SHARED + BLOCK_N - 1) // BLOCK_N
    SCALES: tl.constexpr = K // 128 if GROUPED else 1
    SPAN: tl.constexpr = STEPS * BLOCK_K
    WHOLE: tl.constexpr = K % SPAN == 0
    PARTS: tl.constexpr = BLOCK_K // 8
    GATE_ROWS: tl.constexpr = N if GATED else 0  # before those of up
    token = tl.program_id(0) // programs
    block = tl.program_id(0) % programs
    pair = token * TOP_K + block // blocks
    if OVERLAP:
        gdc_wait()
        # Only now: a dependent's programs run after all of this launch's have come here, so they may read the ids.
        gdc_launch_dependents()
    shared = block >= routed
    if SHARED > 0:  # noqa: SIM108
        expert = tl.load(ids_ptr + pair, mask=block < routed, other=0)
    else:
        expert = tl.load(ids_ptr + pair)
    if (expert >= 0) & (expert < E):
        matrix = w_ptr + expert.to(tl.int64) * ((GATE_ROWS + N) * K)
        out = out_ptr + pair.to(tl.int64) * N
        first = block % blocks * BLOCK_N
        width = N
        if SHARED > 0:
            matrix = tl.where(shared, shared_ptr, matrix)
            out = tl.where(shared, shared_out_ptr + token.to(tl.int64) * SHARED, out)
            first = tl.where(shared, (block - routed) * BLOCK_N, first)
            width = tl.where(shared, SHARED, N)
        n = first + tl.arange(0, BLOCK_N)
        # Rows after the end read the last row and are not stored.
        row = tl.minimum(n, width - 1)
        up_rows = matrix + row[:, None] * K
        if GATED:
            gate_rows = up_rows
            up_rows += width * K
        x_row = x_ptr + token.to(tl.int64) * K + tl.arange(0, 1)[:, None]
        if SCALE_ROWS > 0:
            scales = scale_ptr + expert * (SCALE_COUNT * SCALES)
            if SCALE_ROWS % BLOCK_N == 0 and N % BLOCK_N == 0:  # all rows of a block share scales
                row = first + tl.arange(0, 1)
            if GATED:
                gate_scales = (scales + row // SCALE_ROWS * SCALES)[:, None]  # [1 or BLOCK_N, 1]
            up_scales = (scales + (GATE_ROWS + row) // SCALE_ROWS * SCALES)[:, None]
        if GATED:
            gate = tl.zeros([BLOCK_N, PARTS], tl.float32)
        up = tl.zeros([BLOCK_N, PARTS], tl.float32)
        for base in tl.range(0, K, SPAN):
            for step in tl.static_range(0, SPAN, BLOCK_K):
                at = base + step
                x = load_columns(x_row, at, BLOCK_K, K, WHOLE, WORDS)
                if GATED:
                    w_gate = load_columns(gate_rows, at, BLOCK_K, K, WHOLE, WORDS)
                w_up = load_columns(up_rows, at, BLOCK_K, K, WHOLE, WORDS)
                if GATED:
                    gate_part = products(w_gate, evens(x), odds(x), PARTS)
                up_part = products(w_up, evens(x), odds(x), PARTS)
                if GROUPED:
                    group = (at + tl.arange(0, PARTS) * 8)[None, :] // 128
                    if GATED:
                        gate_part *= tl.load(gate_scales + group, mask=group < SCALES, other=0.0)
                    up_part *= tl.load(up_scales + group, mask=group < SCALES, other=0.0)
                if GATED:
                    gate += gate_part
                up += up_part
        total, factor = tl.sum(gate if GATED else up, axis=1), tl.sum(up, axis=1)
        if SCALE_ROWS > 0 and not GROUPED:
            if GATED:
                total *= tl.sum(tl.load(gate_scales), axis=1)
            factor *= tl.sum(tl.load(up_scales), axis=1)
        result = activated_columns(total, factor, biases_ptr, expert, n, N, GATED, ALPHA, LIMIT, GELU, BIASES)
        tl.store(out + n, result.to(out_ptr.dtype.element_ty), mask=n < width)


@keep_variants
@triton.jit
def _down_kernel(
    x_ptr,  # [pairs, K]
    w_ptr,  # [E, N, K]
    scale_ptr,  # as above
    biases_ptr,  # [E, N], BIASES only
    ids_ptr,  # [pairs]
    weights_ptr,  # [pairs]
    residual_ptr,  # [tokens, N], ADD only; may be out_ptr
    out_ptr,  # [tokens, N]
    shared_x_ptr,  # [tokens, SHARED]; this and the next three are for SHARED only
    shared_ptr,  # [N, SHARED]
    h_ptr,  # [tokens, N], the input of gate and up; this and the next are for GATE only
    gate_ptr,  # [N]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,  # TOP_K, padded to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # blocks of columns in flight; the first ones are loaded before the wait
    WORDS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr,  # scales are of 128 columns
    BIASES: tl.constexpr,
    SHARED: tl.constexpr,  # the inner width of the shared expert; 0: there is none
    SHARED_K: tl.constexpr,  # columns of a block of one of its WIDTH pieces; the first block is loaded before the wait
    GATE: tl.constexpr,  # its result is multiplied by the sigmoid of a row's product with h
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    SCALES: tl.constexpr = K // 128 if GROUPED else 1
    PARTS: tl.constexpr = BLOCK_K // 8
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    SPAN: tl.constexpr = EARLY * BLOCK_K
    LAST: tl.constexpr = SPAN if K < SPAN else K // SPAN * SPAN  # the first column after the last whole span
    token = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, WIDTH)
    if OVERLAP:
        gdc_launch_dependents()
    # The kernel that chose the experts is complete: the kernel before this one waited before it released this one. Read
    # past the first-level cache, which may hold another layer's ids.
    expert = tl.load(ids_ptr + token * TOP_K + j, mask=j < TOP_K, other=-1, cache_modifier=".cg")
    known = (expert >= 0) & (expert < E)
    # A missing expert has a weight of 0 and is replaced by an existing one, whose weights are read anyway.
    expert = tl.where(known, expert, tl.max(tl.where(known, expert, 0), axis=0))
    # Rows after the end read the last row and are not stored.
    row = tl.minimum(n, N - 1)
    w_rows = w_ptr + (expert.to(tl.int64)[:, None] * (N * K) + row[None, :] * K)[:, :, None]
    x_rows = x_ptr + (token * TOP_K + tl.minimum(j, TOP_K - 1)).to(tl.int64)[:, None, None] * K
    early = ()  # loaded while the kernel before this one ends
    for step in tl.static_range(EARLY):
        early = early + (load_columns(w_rows, step * BLOCK_K, BLOCK_K, K, WHOLE, WORDS),)  # noqa: RUF005 (Triton knows no other way)
    if SHARED > 0:
        PIECE: tl.constexpr = SHARED // WIDTH
        SHARED_WHOLE: tl.constexpr = PIECE % SHARED_K == 0
        HIDDEN: tl.constexpr = triton.next_power_of_2(N)
        shared_rows = shared_ptr + (j[:, None] * PIECE + row[None, :] * SHARED)[:, :, None]
        shared_x = shared_x_ptr + (token.to(tl.int64) * SHARED + j * PIECE)[:, None, None]
        shared_early = load_columns(shared_rows, 0, SHARED_K, PIECE, SHARED_WHOLE, WORDS)
        if GATE:  # h is complete, as the ids are
            k = tl.arange(0, HIDDEN)
            h = tl.load(h_ptr + token.to(tl.int64) * N + k, mask=k < N, other=0.0, cache_modifier=".cg").to(tl.float32)
            factor = tl.sigmoid(tl.sum(h * tl.load(gate_ptr + k, mask=k < N, other=0.0).to(tl.float32)))
    if OVERLAP:
        gdc_wait()
    if ADD:
        residual = tl.load(residual_ptr + token.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + token * TOP_K + j, mask=known, other=0.0)
    if SCALE_ROWS % BLOCK_N == 0 and SCALE_ROWS > 0:
        row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, 1)
    scales = scale_ptr  # [WIDTH, 1 or BLOCK_N, 1], if there are scales
    if SCALE_ROWS > 0:
        scales += ((expert[:, None] * SCALE_COUNT + row[None, :] // SCALE_ROWS) * SCALES)[:, :, None]
    acc = tl.zeros([WIDTH, BLOCK_N, PARTS], tl.float32)
    for base in tl.range(SPAN, LAST, SPAN):
        for step in tl.static_range(0, SPAN, BLOCK_K):
            x = load_columns(x_rows, base + step, BLOCK_K, K, WHOLE, WORDS)
            w = load_columns(w_rows, base + step, BLOCK_K, K, WHOLE, WORDS)
            acc += _scaled_products(w, x, scales, base + step, PARTS, SCALES, GROUPED)
    for at in tl.static_range(LAST, K, BLOCK_K):
        x = load_columns(x_rows, at, BLOCK_K, K, WHOLE, WORDS)
        w = load_columns(w_rows, at, BLOCK_K, K, WHOLE, WORDS)
        acc += _scaled_products(w, x, scales, at, PARTS, SCALES, GROUPED)
    for step in tl.static_range(EARLY):
        x = load_columns(x_rows, step * BLOCK_K, BLOCK_K, K, WHOLE, WORDS)
        acc += _scaled_products(early[step], x, scales, step * BLOCK_K, PARTS, SCALES, GROUPED)
    if SCALE_ROWS > 0 and not GROUPED:
        acc *= tl.load(scales)
    # The product of a missing expert may be NaN, because its input was never written.
    acc = tl.where(known[:, None, None], acc * weights[:, None, None], 0.0)
    sums = tl.sum(acc, axis=2)
    if SHARED > 0:
        SHARED_PARTS: tl.constexpr = SHARED_K // 8
        x = load_columns(shared_x, 0, SHARED_K, PIECE, SHARED_WHOLE, WORDS)
        acc = products(shared_early, evens(x), odds(x), SHARED_PARTS)
        for at in tl.static_range(SHARED_K, PIECE, SHARED_K):
            x = load_columns(shared_x, at, SHARED_K, PIECE, SHARED_WHOLE, WORDS)
            w = load_columns(shared_rows, at, SHARED_K, PIECE, SHARED_WHOLE, WORDS)
            acc += products(w, evens(x), odds(x), SHARED_PARTS)
        added = tl.sum(acc, axis=2)
        sums += added * factor if GATE else added
    result = tl.sum(sums, axis=0)
    if BIASES:  # a missing expert has the bias of another, times a weight of 0
        result += tl.sum(row_biases(biases_ptr, expert[:, None], n[None, :], N) * weights[:, None], axis=0)
    if ADD:
        result += residual
    tl.store(out_ptr + token.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _scaled_products(w, x, scales, at, PARTS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr):
    """Multiply columns from `at` on: w [WIDTH, BLOCK_N, columns], x [WIDTH, 1, columns] -> [WIDTH, BLOCK_N, PARTS]."""
    result = products(w, evens(x), odds(x), PARTS)
    if GROUPED:
        GROUPS: tl.constexpr = PARTS // 16 if PARTS > 16 else 1
        group = (at // 128 + tl.arange(0, GROUPS))[None, None, :]
        scale = tl.load(scales + group, mask=group < SCALES, other=0.0)
        parts = tl.reshape(result, [result.shape[0], result.shape[1], GROUPS, PARTS // GROUPS])
        result = tl.reshape(parts * scale[:, :, :, None], result.shape)
    return result


@dataclass(frozen=True, slots=True)
class SingleCut:
    """How one of the two products is divided.

    block_n: rows of a program; up has twice as many if there is no gate. steps: blocks of columns in flight; down's are
    loaded before the wait.
    """

    block_n: int
    block_k: int
    steps: int
    warps: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedMatrices:
    """An expert that all tokens pass, in the type of the rows."""

    gate_up: Tensor  # [2 * inter, hidden], gate's rows first
    down: Tensor  # [hidden, inter]
    gate: Tensor | None  # [1, hidden]: the sigmoid of its product with the token scales the result; None: nothing does

    def __post_init__(self) -> None:
        if not all(one is None or one.is_contiguous() for one in (self.gate_up, self.down, self.gate)):
            raise ValueError("a shared expert's weights must be contiguous")

    def can_fuse(self, h: Tensor, top_k: int) -> bool:
        """Return whether `single_rows` computes it, in whole vectors. h [tokens, hidden]; top_k experts a token."""
        return self.down.dtype == h.dtype and self.down.shape[1] % (8 * power_of_two(top_k)) == 0


@dataclass(frozen=True, slots=True)
class SingleConfig:
    """How experts for single rows are divided."""

    gate_up: SingleCut
    down: SingleCut


def single_rows(
    h: Tensor,
    gate_up: Matrices,
    down: Matrices,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    config: SingleConfig,
    rule: ExpertRule = SILU,
    shared: SharedMatrices | None = None,
) -> Tensor:
    """Compute `Experts.add_to` of contiguous tensors.

    gate_up is [E, 2 * inter, hidden] or, without a gate, [E, inter, hidden]; down is [E, hidden, inter]. shared: an
    expert for all tokens, if it `can_fuse`. It needs matrices without scales and a plain rule with a gate.
    """
    gate_up_bias, down_bias = rule.pointers(h)
    (tokens, hidden), (experts, _, inter), top_k = h.shape, down.weight.shape, ids.shape[1]
    overlap = launch_for(h.device).overlap
    inner = h.new_empty(tokens * top_k, inter)
    out = torch.empty_like(h) if residual is None else residual
    shared_columns, width = 0 if shared is None else shared.down.shape[1], power_of_two(top_k)
    shared_gate_up, shared_down, gate = (h, h, None) if shared is None else (shared.gate_up, shared.down, shared.gate)
    gated = gate is not None
    shared_inner = h if shared is None else h.new_empty(tokens, shared_columns)
    cut = config.gate_up
    block_n = cut.block_n * 2 // rule.parts
    programs = top_k * -(-inter // block_n) + -(-shared_columns // block_n)
    _gate_up_kernel[(tokens * programs,)](
        h, *gate_up.pointers, gate_up_bias, ids, inner, shared_gate_up, shared_inner,
        E=experts, N=inter, K=hidden, TOP_K=top_k, BLOCK_N=block_n, BLOCK_K=cut.block_k, STEPS=cut.steps,
        WORDS=in_words(h, gate_up.weight), **gate_up.constants, GATED=rule.gated, **rule.gate_up, SHARED=shared_columns,
        OVERLAP=overlap, num_warps=cut.warps, launch_pdl=overlap,
    )  # fmt: skip
    cut, piece = config.down, power_of_two(-(-shared_columns // width))
    early = min(cut.steps, -(-inter // cut.block_k))
    # If all columns are loaded before the wait, two programs should fit a processor.
    light = shared is not None and inter <= early * cut.block_k and piece <= cut.block_k
    _down_kernel[(tokens * -(-hidden // cut.block_n),)](
        inner, *down.pointers, down_bias, ids, weights, out, out, shared_inner, shared_down, h, gate if gated else h,
        E=experts, N=hidden, K=inter, TOP_K=top_k, WIDTH=width, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, EARLY=early,
        WORDS=in_words(inner, down.weight), **down.constants, **rule.down, SHARED=shared_columns,
        SHARED_K=max(8, min(cut.block_k, piece)), GATE=gated, ADD=residual is not None, OVERLAP=overlap,
        num_warps=cut.warps, maxnreg=1024 // cut.warps if light else None, launch_pdl=overlap,
    )  # fmt: skip
    return out
