"""Attention to runs of pages that several rows share: each run is read once for all its rows.

The queries of a group's rows form one matrix, BLOCK_M of them to a tile; a tile against a block of the run's keys is a matrix product. As
in `decode_attention`, all tiles' blocks are laid end to end and cut into equal shares, one per worker, and the last
worker to finish a tile adds its parts up in order. The result is each row's share of a softmax: values and the log of
their weight, which `PagedDecode` folds into what the row's own pages give.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.decode_attention import LOG2_E, SharedPart, softmax_step
from aengine.kernels.launch import launch_for, power_of_two


@triton.jit
def _group_work(starts_ptr, lens_ptr, index, exists, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """(first member, members, length of the run, blocks in it, blocks of all tiles) of each group."""
    first = tl.load(starts_ptr + index, mask=exists, other=0)
    members = tl.load(starts_ptr + index + 1, mask=exists, other=0) - first
    length = tl.load(lens_ptr + index, mask=exists, other=0)
    blocks = tl.cdiv(length, BLOCK)
    return first, members, length, blocks, tl.cdiv(members * GROUP, BLOCK_M) * blocks


@triton.jit(do_not_specialize=["groups", "table_stride", "workers"])
def _prefix_kernel(
    q_ptr,  # [rows, KV_HEADS * GROUP, DIM]
    k_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    v_ptr,
    out_ptr,  # [rows, KV_HEADS * GROUP, DIM] float32
    lse_ptr,  # [rows, KV_HEADS * GROUP] float32
    page_table_ptr,  # [rows, ...] int32
    members_ptr,  # [rows] int32, group after group
    starts_ptr,  # [groups + 1] int32, into members
    lens_ptr,  # [groups] int32
    part_ptr,  # [2 * workers, KV_HEADS, BLOCK_M, DIM] float32
    weight_ptr,  # [2 * workers, KV_HEADS, 2, BLOCK_M] float32
    arrived_ptr,  # [workers, KV_HEADS] int32, zero between launches
    groups,
    table_stride,
    q_stride,
    scale,
    workers,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0) % KV_HEADS
    worker = tl.program_id(0) // KV_HEADS
    if OVERLAP:
        gdc_launch_dependents()
    all_groups = tl.arange(0, GROUPS_PAD)
    firsts, sizes, lengths, blocks, counts = _group_work(
        starts_ptr, lens_ptr, all_groups, all_groups < groups, GROUP, BLOCK_M, BLOCK
    )
    line = tl.sum(counts, axis=0)
    share = tl.cdiv(line, workers)
    place = worker * share
    end = tl.minimum(place + share, line)
    before = tl.cumsum(counts, axis=0) <= place
    group = tl.sum((before & (all_groups < groups)).to(tl.int32), axis=0)
    begin = tl.sum(tl.where(before, counts, 0), axis=0)
    if OVERLAP:
        gdc_wait()

    columns = tl.arange(0, DIM)
    tokens = tl.arange(0, BLOCK)
    lanes = tl.arange(0, BLOCK_M)
    k_head = k_ptr + head * DIM + columns[None, :]
    v_head = v_ptr + head * DIM + columns[None, :]
    while place < end:
        first, members, length, run_blocks, count = _group_work(
            starts_ptr, lens_ptr, group, group < groups, GROUP, BLOCK_M, BLOCK
        )
        if place < begin + count:
            tile = (place - begin) // run_blocks
            tile_begin = begin + tile * run_blocks
            from_block = place - tile_begin
            to_block = tl.minimum(run_blocks, end - tile_begin)
            query = tile * BLOCK_M + lanes
            used = query < members * GROUP
            row = tl.load(members_ptr + first + query // GROUP, mask=used, other=0).to(tl.int64)
            row_head = head * GROUP + query % GROUP
            q = tl.load(q_ptr + (row * q_stride + row_head * DIM)[:, None] + columns[None, :], mask=used[:, None], other=0.0)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM], tl.float32)
            # The run's pages, from the table of the group's first row.
            table = page_table_ptr + tl.load(members_ptr + first).to(tl.int64) * table_stride
            positions = from_block * BLOCK + tokens
            pages = tl.load(table + positions // PAGE, mask=positions < length, other=0)
            for step in tl.range(from_block, to_block, num_stages=STAGES):
                visible = positions < length
                offsets = ((pages.to(tl.int64) * PAGE + positions % PAGE) * (KV_HEADS * DIM))[:, None]
                next_positions = positions + BLOCK
                pages = tl.load(table + next_positions // PAGE, mask=next_positions < length, other=0)
                k = tl.load(k_head + offsets, mask=visible[:, None], other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                scores = tl.where(visible[None, :], scores, float("-inf"))
                best, total, acc, weights = softmax_step(scores, best, total, acc)
                v = tl.load(v_head + offsets, mask=visible[:, None], other=0.0)
                acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
                positions = next_positions

            place_out = row * (KV_HEADS * GROUP) + row_head
            if (from_block == 0) & (to_block == run_blocks):
                _write(out_ptr, lse_ptr, place_out, used, best, total, acc, DIM)
            else:
                slot = (2 * worker + (from_block == 0).to(tl.int32)) * KV_HEADS + head
                part = part_ptr + (slot.to(tl.int64) * BLOCK_M + lanes)[:, None] * DIM + columns[None, :]
                tl.store(part, acc)
                tl.store(weight_ptr + slot * 2 * BLOCK_M + lanes, best)
                tl.store(weight_ptr + (slot * 2 + 1) * BLOCK_M + lanes, total)
                first_worker = tile_begin // share
                parts = (tile_begin + run_blocks - 1) // share - first_worker + 1
                arrived = arrived_ptr + first_worker * KV_HEADS + head
                tl.debug_barrier()  # every thread's part is stored before one of them announces it
                if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
                    tl.debug_barrier()
                    tl.store(arrived, 0)
                    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
                    for index in tl.range(0, parts):
                        slot = (2 * (first_worker + index) + tl.where(index == 0, 1, 0)) * KV_HEADS + head
                        # Other processors wrote these: read past the first-level cache.
                        weight = weight_ptr + slot * 2 * BLOCK_M + lanes
                        part_best = tl.load(weight, cache_modifier=".cg")
                        part_total = tl.load(weight + BLOCK_M, cache_modifier=".cg")
                        part = part_ptr + (slot.to(tl.int64) * BLOCK_M + lanes)[:, None] * DIM + columns[None, :]
                        values = tl.load(part, cache_modifier=".cg")
                        new_best = tl.maximum(best, part_best)
                        shrink = tl.math.exp2(best - new_best)
                        grow = tl.math.exp2(part_best - new_best)
                        total = total * shrink + part_total * grow
                        acc = acc * shrink[:, None] + values * grow[:, None]
                        best = new_best
                    _write(out_ptr, lse_ptr, place_out, used, best, total, acc, DIM)
            place = tile_begin + to_block
        if place >= begin + count:
            begin += count
            group += 1


@triton.jit
def _write(out_ptr, lse_ptr, place, used, best, total, acc, DIM: tl.constexpr):
    out = out_ptr + place[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out, acc / total[:, None], mask=used[:, None])
    tl.store(lse_ptr + place, best + tl.math.log2(total), mask=used)


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Which rows of a batch share which leading positions. All int32 on the device; unused groups have no members.

    A row is in at most one group. All rows of a group name the same pages for the first `lens` positions in their page tables;
    `lens` counts whole pages and leaves each row at least its newest token.
    """

    members: Tensor  # [rows]: row numbers, group after group
    group_starts: Tensor  # [groups + 1]: where each group's members begin
    lens: Tensor  # [groups]: positions that the group shares
    starts: Tensor  # [rows]: the same per row, 0 for rows of no group


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    block_m: int
    block: int
    stages: int
    warps: int
    crowd: int


def prefix_config(queries: int, dim: int, element_size: int) -> PrefixConfig:
    """queries: most that a group can have for one KV head."""
    if element_size > 2:
        return PrefixConfig(block_m=32, block=32, stages=2, warps=4, crowd=1)
    if queries <= 64 or dim > 128:
        return PrefixConfig(block_m=64, block=64 if dim <= 128 else 32, stages=3, warps=4, crowd=2)
    return PrefixConfig(block_m=128, block=64, stages=3, warps=8, crowd=1)


class PrefixAttention:
    """The kernel and its scratch memory. One stream at a time: launches share the scratch."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        runs: SharedRuns,
        scale: float,
        config: PrefixConfig | None = None,
    ) -> SharedPart:
        """What the shared runs give to each row, for `PagedDecode(shared=...)` of the same q, caches and page table.

        q [rows, heads, dim] (heads contiguous), caches [pages, page_size, kv_heads, dim] (contiguous), page_table [rows, ...]
        int32. Rows of no group get no values. Layers with a sliding window must not use it.
        """
        rows, heads, dim = q.shape
        page_size, kv_heads = k_cache.shape[1:3]
        group = heads // kv_heads
        out = torch.empty(rows, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        groups = runs.lens.shape[0]
        config = config or prefix_config(rows * group, dim, q.element_size())
        launch = launch_for(q.device)
        workers = max(1, launch.processors * config.crowd // kv_heads)
        parts, weights, arrived = self._scratch_for(q.device, workers, kv_heads, config.block_m, dim)
        _prefix_kernel[(workers * kv_heads,)](
            q, k_cache, v_cache, out, lse, page_table, runs.members, runs.group_starts, runs.lens,
            parts, weights, arrived, groups, page_table.stride(0), q.stride(0), scale * LOG2_E, workers,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, PAGE=page_size, GROUPS_PAD=max(16, power_of_two(groups)),
            BLOCK_M=config.block_m, BLOCK=config.block, STAGES=config.stages,
            PRECISION="ieee" if q.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
            num_warps=config.warps, launch_pdl=launch.overlap,
        )  # fmt: skip
        return SharedPart(runs.starts, out, lse)

    def _scratch_for(
        self, device: torch.device, workers: int, kv_heads: int, block_m: int, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = (workers, kv_heads, block_m, dim)
        if key not in self._scratch:
            self._scratch[key] = (
                torch.empty(2 * workers, kv_heads, block_m, dim, dtype=torch.float32, device=device),
                torch.empty(2 * workers, kv_heads, 2, block_m, dtype=torch.float32, device=device),
                torch.zeros(workers, kv_heads, dtype=torch.int32, device=device),
            )
        return self._scratch[key]
