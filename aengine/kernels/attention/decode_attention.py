"""Attention of one query token per sequence, or of a few, over its pages. Memory bandwidth limits it.

The grid fills the device exactly once, for any batch. The blocks of all sequences form one list, and every worker
takes an equal share of it: the end of one sequence, some complete ones, and the start of another. It computes its share
from the sequence lengths. So the work is even for any mix of lengths, a captured graph serves any context, and few
sequences are split. The KV heads of a worker are neighbouring programs, which read the same pages at the same time.

If a sequence is in one share, its result is written at once. Otherwise each worker stores its part, and the last
worker to finish adds up the parts in their order. So the sum does not depend on which worker is last. Many parts are
first added up in groups.

Drafts make several query tokens. The heads of all of them are the columns of the same matrix products, so keys and
values are read once. If there are too many columns, tiles of queries are neighbouring programs, as KV heads are.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.attention.codes import LEAST, PAIRS_ASM, code_pairs, divisor, in_float16
from aengine.kernels.attention.config import DecodeConfig, decode_config, group_pad, parts_at_once, tile_queries
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.attention.prefix_attention import SharedPart
from aengine.kernels.attention.softmax import (
    LOG2_E,
    add_up_parts,
    finish_row,
    first_rows,
    mask_padding,
    page_ids,
    softmax_step_transposed,
    span_blocks,
    spread_columns,
    store_part,
    take_share,
    with_sink,
)
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.parts import is_last
from aengine.kernels.variants import keep_variants

REGISTERS = 65536  # registers of a multiprocessor
PARTS_OF_DRAFTS = 8  # parts of a group if a row has drafts: these parts are large, so few are added up in one step


@keep_variants
@triton.jit(
    do_not_specialize=["rows", "table_stride", "window", "workers"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr", "starts_ptr"],
)
def _decode_kernel(
    q_ptr,  # [rows * QUERIES, KV_HEADS * GROUP, DIM]
    k_ptr,  # [pages, PAGE, KV_HEADS, DIM]
    v_ptr,
    out_ptr,  # [rows * QUERIES, KV_HEADS * GROUP, DIM]
    page_table_ptr,  # [rows, ...] int32
    seq_lens_ptr,  # [rows] int32
    starts_ptr,  # [rows] int32, with SHARED: the prefix kernel covered the positions before this one
    shared_out_ptr,  # [SHARED, rows, KV_HEADS * GROUP, DIM] float32: its results
    shared_lse_ptr,  # [SHARED, rows, KV_HEADS * GROUP] float32: log2 of their weights
    part_ptr,  # [2, 2 * workers, LANES, COLUMNS, DIM] float32: parts, then sums of groups of parts
    weight_ptr,  # [2, 2 * workers, LANES, 2, COLUMNS] float32: maximum and total of each
    arrived_ptr,  # [2, 2 * workers, LANES] int32, zero between launches
    sinks_ptr,  # [KV_HEADS * GROUP] float32, with SINKS
    rows,
    table_stride,
    q_stride,
    window,  # with WINDOWED: how many positions the queries of a row see together
    scale,
    value_scale,  # of FP8 caches
    cap,  # with SOFTCAP, in base 2 as `scale`
    workers,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # of a row, at its last positions
    TILE: tl.constexpr,  # queries of a program
    CAUSAL: tl.constexpr,  # whether a query sees the positions up to its own; else all of its row
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,  # the next power of two from DIM
    PAGE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    COLUMNS_PAD: tl.constexpr,  # >= 8: the width of a matrix product
    MERGE_GROUP: tl.constexpr,  # power of two >= COLUMNS
    MERGE: tl.constexpr,  # parts added up in one step
    PARTS: tl.constexpr,  # parts of a group, a multiple of MERGE
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # blocks of a share at least
    RUN: tl.constexpr,  # neighbouring keys of a block that share a page
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,  # the caches have 2 ** 31 elements or more
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,  # parts of the shared result, a power of two; 0: nothing is shared
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,  # how `code_pairs` takes codes apart
    OVERLAP: tl.constexpr,
):
    COLUMNS: tl.constexpr = TILE * GROUP
    LANES: tl.constexpr = KV_HEADS * ((QUERIES + TILE - 1) // TILE)  # programs of a worker
    lane = tl.program_id(0) % LANES
    worker = tl.program_id(0) // LANES
    head = lane
    query = 0
    if QUERIES > 1:
        head = lane % KV_HEADS
        # The last tile may overlap the one before. Both write the same results.
        query = tl.minimum(lane // KV_HEADS * TILE, QUERIES - TILE)

    all_rows = tl.arange(0, ROWS_PAD)
    exists = all_rows < rows
    lens = tl.load(seq_lens_ptr + all_rows, mask=exists, other=0)
    starts = tl.zeros_like(lens)
    if SHARED:
        starts = tl.load(starts_ptr + all_rows, mask=exists, other=0)
    _firsts, counts = span_blocks(lens, starts, window, BLOCK, WINDOWED)
    counts = tl.where(exists & (lens >= 0), counts, 0)
    share, place, end, row, begin = take_share(counts, exists, worker, workers, PIECE)
    seq_len = tl.sum(tl.where(all_rows == row, lens, 0), axis=0)
    start = tl.sum(tl.where(all_rows == row, starts, 0), axis=0)

    group = tl.arange(0, COLUMNS_PAD)
    queries = query + group // GROUP
    columns = tl.arange(0, DIM_PAD)
    # FP8 values are loaded as pairs of columns, and multiplied in two products with half of the columns each. So no
    # load is a single byte, although a product needs pairs of tokens.
    FP8: tl.constexpr = v_ptr.dtype.element_ty.is_fp8()
    PAIRS: tl.constexpr = FP8 and DIM >= 32
    half = tl.arange(0, DIM_PAD // 2)
    v_pairs = v_ptr.to(tl.pointer_type(tl.int16)) + head * (DIM // 2) if PAIRS else v_ptr
    tokens = tl.arange(0, BLOCK)
    runs = tl.arange(0, BLOCK // RUN) * RUN
    k_head = k_ptr + head * DIM
    v_head = v_ptr + head * DIM
    first, _count = span_blocks(seq_len, start, window, BLOCK, WINDOWED)
    position = (first + place - begin) * BLOCK
    pages = page_ids(page_table_ptr, row, table_stride, position + runs, seq_len, PAGE)
    if OVERLAP:
        # A worker without a share ends here, so that the next kernel can use its processor. The first one always waits.
        if (place < end) | (worker == 0):
            gdc_wait()
        # Not earlier: the next product loads its weights at once, and would delay these keys and values.
        gdc_launch_dependents()

    while place < end:
        low = start
        if WINDOWED:
            low = tl.maximum(seq_len - window, low)
        first, count = span_blocks(seq_len, start, window, BLOCK, WINDOWED)
        from_block = place - begin
        to_block = tl.minimum(count, end - begin)
        next_len = tl.load(seq_lens_ptr + row + 1, mask=row + 1 < rows, other=0)
        next_start = 0
        if SHARED:
            next_start = tl.load(starts_ptr + row + 1, mask=row + 1 < rows, other=0)

        next_first, _count = span_blocks(next_len, next_start, window, BLOCK, WINDOWED)
        next_row_position = next_first * BLOCK
        next_row_pages = page_ids(page_table_ptr, row + 1, table_stride, next_row_position + runs, next_len, PAGE)
        if QUERIES > 1:
            q_row = q_ptr + (row.to(tl.int64) * QUERIES + queries)[:, None] * q_stride
            q_row += (head * GROUP + group % GROUP)[:, None] * DIM
        else:
            q_row = q_ptr + row.to(tl.int64) * q_stride + (head * GROUP + group)[:, None] * DIM
        q = tl.load(
            q_row + columns[None, :], mask=mask_padding((group < COLUMNS)[:, None], columns[None, :], DIM), other=0.0
        )
        row_scale = tl.full([COLUMNS_PAD], scale, tl.float32)
        if FP8 and q.dtype == tl.bfloat16:
            q, power = in_float16(q)
            row_scale = tl.maximum(row_scale * power, LEAST)
        capped_scale = row_scale
        if SOFTCAP:
            capped_scale = tl.full([COLUMNS_PAD], cap, tl.float32)
        # Keys are the rows of every product and queries its columns: there are few queries, and 8 columns suffice.
        q = tl.trans(q)
        best = tl.full([COLUMNS_PAD], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK, COLUMNS_PAD], tl.float32)
        acc = tl.zeros([DIM_PAD, COLUMNS_PAD], tl.float32)
        acc_0 = tl.zeros([DIM_PAD // 2, COLUMNS_PAD], tl.float32)
        acc_1 = acc_0
        for _step in tl.range(from_block, to_block, num_stages=STAGES):
            positions = position + tokens
            visible = positions < seq_len
            if WINDOWED or SHARED:
                visible &= positions >= low
            if WIDE:
                pages = pages.to(tl.int64)
            # Each thread computes the slots of its own keys: no barrier.
            run_slots = pages * PAGE if RUN == PAGE else pages * PAGE + (position + runs) % PAGE
            slots = tl.reshape(run_slots[:, None] + tl.arange(0, RUN)[None, :], [BLOCK])
            k_offsets = (slots * (KV_HEADS * DIM))[:, None] + columns[None, :]
            # Load page ids one block ahead, so that the copies of K and V never wait for their addresses.
            position += BLOCK
            pages = page_ids(page_table_ptr, row, table_stride, position + runs, seq_len, PAGE)
            # Keys after the end may hold any values, because their scores are replaced.
            if DIM == DIM_PAD:
                k = tl.load(k_head + k_offsets).to(q.dtype)
            else:
                k = tl.load(k_head + k_offsets, mask=(columns < DIM)[None, :], other=0.0).to(q.dtype)
            scores = tl.dot(k, q, input_precision=PRECISION)
            if SOFTCAP:
                scores = 2 * tl.sigmoid(2 * scores * (row_scale / cap)[None, :]) - 1  # the hyperbolic tangent
            seen = visible[:, None]
            if CAUSAL and QUERIES > 1:
                seen = positions[:, None] < (seq_len - (QUERIES - 1) + queries)[None, :]
                if WINDOWED:
                    seen &= positions[:, None] >= (seq_len - window + queries)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            best, totals, shrink, weights = softmax_step_transposed(scores, capped_scale, best, totals)
            weights = weights.to(q.dtype)
            # Mask hidden values: a page may hold an old NaN, and NaN times a weight of zero is NaN.
            if PAIRS:
                v_offsets = (slots * (KV_HEADS * DIM // 2))[None, :] + half[:, None]
                pairs = tl.load(
                    v_pairs + v_offsets, mask=mask_padding(visible[None, :], half[:, None], DIM // 2), other=0
                )
                v_0, v_1 = code_pairs(pairs, q.dtype, ASM)
                acc_0 = tl.dot(v_0, weights, acc_0 * shrink[None, :], input_precision=PRECISION)
                acc_1 = tl.dot(v_1, weights, acc_1 * shrink[None, :], input_precision=PRECISION)
            else:
                v_offsets = (slots * (KV_HEADS * DIM))[None, :] + columns[:, None]
                inside = mask_padding(visible[None, :], columns[:, None], DIM)
                v = tl.load(v_head + v_offsets, mask=inside, other=0.0).to(q.dtype)
                acc = tl.dot(v, weights, acc * shrink[None, :], input_precision=PRECISION)

        total = tl.sum(totals, axis=0)
        acc = tl.interleave(tl.trans(acc_0), tl.trans(acc_1)) if PAIRS else tl.trans(acc)
        row_heads = row.to(tl.int64) * (QUERIES * KV_HEADS * GROUP) + head * GROUP
        if QUERIES > 1:
            row_heads += query * (KV_HEADS * GROUP)
        if (from_block == 0) & (to_block == count):
            if SHARED:
                # Drop the rows that pad the matrix product.
                finish_row(
                    out_ptr, v_ptr, value_scale, shared_out_ptr, shared_lse_ptr, row_heads, rows, start,
                    first_rows(best, MERGE_GROUP), first_rows(total, MERGE_GROUP), first_rows(acc, MERGE_GROUP),
                    KV_HEADS * GROUP, GROUP, COLUMNS, DIM, MERGE_GROUP, SHARED,
                )  # fmt: skip
            else:
                if SINKS:
                    total = with_sink(best, total, sinks_ptr + head * GROUP, GROUP, COLUMNS)
                safe_total = divisor(total, v_ptr, value_scale)
                places = row_heads + spread_columns(group, GROUP, COLUMNS, KV_HEADS * GROUP)
                out = out_ptr + places[:, None] * DIM + columns[None, :]
                inside = mask_padding((group < COLUMNS)[:, None], columns[None, :], DIM)
                tl.store(out, (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        else:
            # A worker starts at most one row that it does not end (slot 1), and continues at most one that it did not
            # start (slot 0). So a row's first part is in some worker's slot 1, and its other parts are in slots 0.
            slot = (2 * worker + (from_block == 0).to(tl.int32)) * LANES + lane
            store_part(part_ptr, weight_ptr, slot, best, total, acc, COLUMNS, DIM)
            first_worker = begin // share
            parts = (begin + count - 1) // share - first_worker + 1
            # The last to arrive adds them up, MERGE in one step. If they are more than two groups of PARTS, the last of
            # each group adds up the group, and the last of all groups adds up their sums.
            width = tl.where(parts <= 2 * PARTS, parts, PARTS)
            leader = (worker - first_worker) // width * width
            leader_slot = (2 * (first_worker + leader) + (leader == 0).to(tl.int32)) * LANES + lane
            neighbours = tl.minimum(parts - leader, width)
            if is_last(arrived_ptr + leader_slot, neighbours):
                merged_best, merged_total, merged = add_up_parts(
                    part_ptr, weight_ptr, first_worker, leader, neighbours, 1, lane,
                    LANES, COLUMNS, DIM, DIM_PAD, MERGE_GROUP, MERGE,
                )  # fmt: skip
                finished = parts == width
                if parts > width:
                    sums = 2 * workers * LANES  # slots and counters of the sums follow the parts'
                    store_part(
                        part_ptr, weight_ptr, sums + leader_slot, merged_best, merged_total, merged, COLUMNS, DIM
                    )
                    groups = tl.cdiv(parts, width)
                    finished = is_last(arrived_ptr + sums + (2 * first_worker + 1) * LANES + lane, groups)
                    if finished:
                        merged_best, merged_total, merged = add_up_parts(
                            part_ptr + sums * COLUMNS * DIM, weight_ptr + sums * 2 * COLUMNS,
                            first_worker, 0, groups, width, lane, LANES, COLUMNS, DIM, DIM_PAD, MERGE_GROUP, MERGE,
                        )  # fmt: skip
                if finished:
                    if SINKS:
                        merged_total = with_sink(merged_best, merged_total, sinks_ptr + head * GROUP, GROUP, COLUMNS)
                    finish_row(
                        out_ptr, v_ptr, value_scale, shared_out_ptr, shared_lse_ptr, row_heads, rows, start,
                        merged_best, merged_total, merged,
                        KV_HEADS * GROUP, GROUP, COLUMNS, DIM, MERGE_GROUP, SHARED,
                    )  # fmt: skip
        place = begin + to_block
        begin += count
        row += 1
        seq_len = next_len
        start = next_start
        position = next_row_position
        pages = next_row_pages


class PagedDecode:
    """The kernel and its scratch memory. All launches share the scratch, so they must be on one stream at a time."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None = None,
        shared: SharedPart | None = None,
        config: DecodeConfig | None = None,
        out: Tensor | None = None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
        queries: int = 1,
        causal: bool = True,
    ) -> Tensor:
        """Return the attention of each row's queries, [rows * queries, heads, dim].

        Args:
            q: [rows * queries, heads, dim], heads contiguous.
            k_cache, v_cache: [pages, page_size, kv_heads, dim], contiguous, in q's dtype or FP8.
            page_table: [rows, ...] int32.
            seq_lens: [rows] int32. Rows of length 0 give zeros. Rows of length -1 come last and give no results.
            scale: Above 0. With FP8 caches it includes the scale of keys.
            window: How many positions a query sees, its own included. None: all.
            shared: The result for pages that rows share. Scores must be plain and queries 1 then.
            value_scale: Value = code * value_scale in FP8 caches.
            scores: The softcap and the sinks.
            queries: Query tokens of each row, at its last positions. Each sees the positions up to its own. A query
                before the start of its row gives zeros.
            causal: False: each query sees all positions of its row. No layer with a window has this.

        Needs no host sync. Raises ValueError for another layout.
        """
        tokens, heads, dim = q.shape
        rows = tokens // queries
        page_size, kv_heads = k_cache.shape[1:3]
        if dim % 2 or not 16 <= dim <= 512:
            raise ValueError(f"head_dim must be an even number from 16 to 512, got {dim}")
        if not (k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(1) == dim and q.stride(2) == 1):
            raise ValueError("q and the KV caches must be contiguous")
        if rows * queries != tokens:
            raise ValueError(f"q must have {queries} tokens of each row, got {tokens}")
        if queries > 1 and shared is not None:
            raise ValueError("shared must be None for several queries of a row")
        if out is None:
            out = q.new_empty(tokens, heads, dim)
        if rows == 0:
            return out
        group, dim_pad, launch = heads // kv_heads, power_of_two(dim), launch_for(q.device)
        tile = tile_queries(queries, group, dim_pad)
        columns, lanes = tile * group, kv_heads * -(-queries // tile)
        config = config or decode_config(
            rows, columns, dim_pad, q.element_size(), launch, shared is not None, k_cache.element_size(), window,
            queries > 1,
        )  # fmt: skip
        workers = max(1, launch.processors * config.crowd // lanes)
        parts, weights, arrived = self._scratch_for(q.device, workers, lanes, columns, dim)
        merged = parts_at_once(config, columns, dim_pad, queries > 1)
        _decode_kernel[(workers * lanes,)](
            q, k_cache, v_cache, out, page_table, seq_lens,
            seq_lens if shared is None else shared.starts,
            parts if shared is None else shared.out,
            weights if shared is None else shared.lse,
            parts, weights, arrived, weights if scores.sinks is None else scores.sinks,
            rows, page_table.stride(0), q.stride(0), window + queries - 1 if window else 0, scale * LOG2_E, value_scale,
            (scores.softcap or 0.0) * LOG2_E, workers,
            KV_HEADS=kv_heads, GROUP=group, QUERIES=queries, TILE=tile, CAUSAL=causal, DIM=dim, DIM_PAD=dim_pad,
            ROWS_PAD=max(64, power_of_two(rows)), COLUMNS_PAD=group_pad(columns), MERGE_GROUP=power_of_two(columns),
            MERGE=merged, PARTS=merged if queries == 1 else max(merged, PARTS_OF_DRAFTS), PAGE=page_size,
            BLOCK=config.block, PIECE=config.piece, RUN=math.gcd(config.block, page_size), STAGES=config.stages,
            WIDE=k_cache.numel() >= 2**31, WINDOWED=window is not None, SHARED=0 if shared is None else len(shared.lse),
            SOFTCAP=scores.softcap is not None, SINKS=scores.sinks is not None,
            PRECISION="ieee" if q.element_size() > 2 else "tf32",
            ASM=PAIRS_ASM if launch.fp8 and q.element_size() == 2 else "",
            OVERLAP=launch.overlap, num_warps=config.warps,
            maxnreg=REGISTERS // (config.crowd * config.warps * 32) // 8 * 8, launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

    def _scratch_for(
        self, device: torch.device, workers: int, lanes: int, columns: int, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = (workers, lanes, columns, dim)
        if key not in self._scratch:
            self._scratch[key] = (
                torch.empty(2, 2 * workers, lanes, columns, dim, dtype=torch.float32, device=device),
                torch.empty(2, 2 * workers, lanes, 2, columns, dtype=torch.float32, device=device),
                torch.zeros(2, 2 * workers, lanes, dtype=torch.int32, device=device),
            )
        return self._scratch[key]
