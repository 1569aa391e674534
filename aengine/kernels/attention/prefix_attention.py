"""Attention over runs of pages that several rows share. Each run is read once for all its rows.

The queries of a group's rows form one matrix, in tiles of BLOCK_M. A tile times a block of keys is a matrix product.
Every run is divided into the same number of parts, so that a few tiles fill the device. The result of a part is part
of a softmax: mean values, and the log of their weight. `PagedDecode` merges the parts with the attention over the
other pages of each row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.attention.softmax import LOG2_E, mask_padding, softmax_step
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants

MOST_PARTS = 16
RESERVED = 2048  # bytes of shared memory for exchanges within a program, apart from the tiles


@keep_variants
@triton.jit(do_not_specialize=["rows", "groups", "table_stride"])
def _prefix_kernel(
    q_ptr,  # [rows, KV_HEADS * GROUP, DIM]
    k_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    v_ptr,
    out_ptr,  # [PARTS, rows, KV_HEADS * GROUP, DIM] float32
    lse_ptr,  # [PARTS, rows, KV_HEADS * GROUP] float32
    page_table_ptr,  # [rows, ...] int32
    members_ptr,  # [rows] int32: the rows of each group, group after group
    starts_ptr,  # [groups + 1] int32, into members
    lens_ptr,  # [groups] int32
    rows,
    groups,
    table_stride,
    q_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,  # the next power of two from DIM
    PAGE: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Heads and parts of a tile are neighbouring programs, which read the same queries and pages at the same time.
    head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(0) // KV_HEADS % PARTS
    place = tl.program_id(0) // (KV_HEADS * PARTS)
    if OVERLAP:
        gdc_launch_dependents()
    # Find the group and its tile. The tiles of all groups are numbered in order.
    index = tl.arange(0, GROUPS_PAD)
    exists = index < groups
    sizes = tl.load(starts_ptr + index + 1, mask=exists, other=0) - tl.load(starts_ptr + index, mask=exists, other=0)
    tiles = tl.cdiv(sizes * GROUP, BLOCK_M)
    before = (tl.cumsum(tiles, axis=0) <= place) & exists
    group = tl.sum(before.to(tl.int32), axis=0)
    tile = place - tl.sum(tl.where(before, tiles, 0), axis=0)
    if OVERLAP:
        gdc_wait()
    if group < groups:
        first = tl.load(starts_ptr + group)
        members = tl.load(starts_ptr + group + 1) - first
        length = tl.load(lens_ptr + group)
        piece = tl.cdiv(tl.cdiv(length, BLOCK), PARTS)
        from_block = part * piece
        to_block = tl.minimum(from_block + piece, tl.cdiv(length, BLOCK))

        columns = tl.arange(0, DIM_PAD)
        tokens = tl.arange(0, BLOCK)
        query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        used = query < members * GROUP
        row = tl.load(members_ptr + first + query // GROUP, mask=used, other=0).to(tl.int64)
        row_head = head * GROUP + query % GROUP
        inside = mask_padding(used[:, None], columns[None, :], DIM)
        q = tl.load(q_ptr + (row * q_stride + row_head * DIM)[:, None] + columns[None, :], mask=inside, other=0.0)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        # The run's pages are read from the table of the group's first row.
        table = page_table_ptr + tl.load(members_ptr + first).to(tl.int64) * table_stride
        positions = from_block * BLOCK + tokens
        pages = tl.load(table + positions // PAGE, mask=positions < length, other=0)
        for _step in tl.range(from_block, to_block, num_stages=STAGES):
            visible = positions < length
            slots = (pages.to(tl.int64) * PAGE + positions % PAGE) * KV_HEADS + head
            offsets = slots[:, None] * DIM + columns[None, :]
            next_positions = positions + BLOCK
            pages = tl.load(table + next_positions // PAGE, mask=next_positions < length, other=0)
            kept = mask_padding(visible[:, None], columns[None, :], DIM)
            k = tl.load(k_ptr + offsets, mask=kept, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(visible[None, :], scores, float("-inf"))
            best, total, acc, weights = softmax_step(scores, best, total, acc)
            v = tl.load(v_ptr + offsets, mask=kept, other=0.0).to(q.dtype)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            positions = next_positions

        out = (part * rows + row) * (KV_HEADS * GROUP) + row_head
        if from_block < to_block:
            tl.store(lse_ptr + out, best + tl.math.log2(total), mask=used)
            tl.store(out_ptr + out[:, None] * DIM + columns[None, :], acc / total[:, None], mask=inside)
        else:
            # A part without blocks has no weight, and its values are not read.
            tl.store(lse_ptr + out, best, mask=used)


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Groups of rows that share their first positions. All int32 on the device. Unused groups have no members.

    A row is in at most one group. All rows of a group have the same pages for their first `lens` positions. They are
    complete pages, and do not include a row's newest token.
    """

    members: Tensor  # [rows]: row numbers, group after group
    group_starts: Tensor  # [groups + 1]: where each group's members begin
    lens: Tensor  # [groups]: positions that the group shares
    starts: Tensor  # [rows]: `lens` of each row's group, 0 without a group


@dataclass(frozen=True, slots=True)
class SharedPart:
    """The attention of each row over the pages that it shares with other rows.

    The softmax is not complete: it has parts, which `PagedDecode` merges.
    """

    starts: Tensor  # [rows] int32: how many leading positions of the row it covers; 0: none
    out: Tensor  # [parts, rows, heads, dim] float32: the weighted mean of each part's values
    lse: Tensor  # [parts, rows, heads] float32: log2 of each part's weight


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """How the kernel divides its work."""

    block_m: int  # queries of a tile
    block: int  # keys of an iteration
    stages: int  # stages of the copy pipeline
    warps: int
    crowd: int  # programs on each processor at once

    def shared_memory(self, dim: int, element_size: int) -> int:
        """Return the bytes for the queries, and for the keys and values of all stages."""
        return (self.block_m + 2 * self.block * (self.stages - 1)) * dim * element_size


def prefix_config(queries: int, dim: int, element_size: int, shared_memory: int) -> PrefixConfig:
    """Return the config of a shape.

    queries: the most queries of a group for one KV head. dim: padded. shared_memory: bytes that a program may use.
    """
    config = _measured(queries, dim, element_size)
    while config.shared_memory(dim, element_size) > shared_memory and config.block > 16:
        if config.block_m > 16:
            config = replace(config, block_m=config.block_m // 2)
        else:
            config = replace(config, block=config.block // 2)
    return config


def _measured(queries: int, dim: int, element_size: int) -> PrefixConfig:
    if element_size > 2:
        return PrefixConfig(block_m=16, block=32, stages=2, warps=4, crowd=2)
    if dim > 128:
        return PrefixConfig(block_m=64, block=32, stages=2, warps=4, crowd=1)
    if queries <= 64:
        return PrefixConfig(block_m=max(16, power_of_two(queries)), block=64, stages=3, warps=4, crowd=2)
    return PrefixConfig(block_m=128, block=64, stages=3, warps=8, crowd=1)


def attend_shared(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    runs: SharedRuns,
    scale: float,
    config: PrefixConfig | None = None,
) -> SharedPart:
    """Return the attention of each row over its shared run, for `PagedDecode` with the same q, caches and page table.

    q [rows, heads, dim] has contiguous heads; the caches [pages, page_size, kv_heads, dim] are contiguous; page_table
    is [rows, ...] int32. With FP8 caches the result is in codes: `PagedDecode` applies the scale of values. Layers with
    a sliding window are not supported.
    """
    rows, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    groups = runs.lens.shape[0]
    dim_pad, launch = power_of_two(dim), launch_for(q.device)
    config = config or prefix_config(rows * group, dim_pad, q.element_size(), launch.shared_memory - RESERVED)
    tiles = -(-rows * group // config.block_m)
    parts = MOST_PARTS
    while parts > 1 and parts * tiles * kv_heads > launch.processors * config.crowd:
        parts //= 2
    out = torch.empty(parts, rows, heads, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, rows, heads, dtype=torch.float32, device=q.device)
    # One tile of every group may be partly empty.
    _prefix_kernel[((tiles + groups) * parts * kv_heads,)](
        q, k_cache, v_cache, out, lse, page_table, runs.members, runs.group_starts, runs.lens,
        rows, groups, page_table.stride(0), q.stride(0), scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_PAD=dim_pad, PAGE=page_size,
        GROUPS_PAD=max(16, power_of_two(groups)), PARTS=parts, BLOCK_M=config.block_m, BLOCK=config.block,
        STAGES=config.stages, PRECISION="ieee" if q.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
        num_warps=config.warps, launch_pdl=launch.overlap,
    )  # fmt: skip
    return SharedPart(runs.starts, out, lse)
