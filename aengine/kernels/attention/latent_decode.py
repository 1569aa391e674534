"""Attention of decodes over pages of latents. A tile of heads reads each latent once, as key and as value.

Work is divided as in `decode_attention`: the blocks of all rows form one list, and each worker takes an equal share.
A second launch adds up the parts of split rows in their order. Parts are large, so it uses many programs. If a row
has several queries, the heads of all of them are tiled together.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.attention.codes import LEAST, PAIRS_ASM, code_pairs, divisor, pair_in_float16
from aengine.kernels.attention.config import latent_decode_config, merge_spans, tile_heads
from aengine.kernels.attention.softmax import (
    LOG2_E,
    merge_parts,
    page_ids,
    softmax_step_transposed,
    store_part,
    take_share,
)
from aengine.kernels.kv_scales import FP8
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants

MERGED = 8192  # elements of parts that a program adds up in one step


@triton.jit
def _block_counts(seq_lens_ptr, rows, ROWS_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of blocks of each row, [ROWS_PAD]: at least one, but zero for rows of length -1."""
    index = tl.arange(0, ROWS_PAD)
    lens = tl.load(seq_lens_ptr + index, mask=index < rows, other=-1)
    return tl.where(lens >= 0, tl.maximum(tl.cdiv(lens, BLOCK), 1), 0)


@keep_variants
@triton.jit(
    do_not_specialize=["rows", "table_stride", "workers"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr"],
)
def _decode_kernel(
    q_ptr,  # [rows, heads, RANK + TURNED]: QUERIES tokens follow each other
    cache_ptr,  # [pages, PAGE, RANK + TURNED]
    out_ptr,  # [rows, heads, RANK]
    page_table_ptr,  # [rows, ...] int32
    seq_lens_ptr,  # [rows] int32
    part_ptr,  # [2 * workers, TILES, GROUP, RANK_PAD] float32
    weight_ptr,  # [2 * workers, TILES, 2, GROUP] float32: maximum and total of each
    rows,
    heads,
    table_stride,
    q_stride,
    scale,
    value_scale,
    workers,
    TILES: tl.constexpr,  # of heads
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # of a row, at its last positions, with heads / QUERIES each
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNED_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,  # neighbouring latents of a block that share a page
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,  # the cache has 2 ** 31 elements or more
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,  # how `code_pairs` takes codes apart
    OVERLAP: tl.constexpr,
):
    WIDTH: tl.constexpr = RANK + TURNED
    # FP8 latents are loaded as pairs of neighbours and split into two tensors of half the columns. So both products can
    # use them unchanged, although the second one needs pairs of rows.
    CODES: tl.constexpr = cache_ptr.dtype.element_ty.is_fp8()
    cache_pairs = cache_ptr.to(tl.pointer_type(tl.int16)) if CODES else cache_ptr
    half = tl.arange(0, RANK_PAD // 2)
    tile = tl.program_id(0) % TILES
    worker = tl.program_id(0) // TILES
    if OVERLAP:
        gdc_launch_dependents()

    counts = _block_counts(seq_lens_ptr, rows, ROWS_PAD, BLOCK)
    exists = tl.arange(0, ROWS_PAD) < rows
    _share, place, end, row, begin = take_share(counts, exists, worker, workers, 0)

    group = tl.arange(0, GROUP_PAD)
    head = tile * GROUP + group
    queries = head // (heads // QUERIES)
    known = (group < GROUP) & (head < heads)
    columns = tl.arange(0, RANK_PAD)
    turned = tl.arange(0, TURNED_PAD)
    runs = tl.arange(0, BLOCK // RUN) * RUN
    if OVERLAP:  # noqa: SIM102 (a constant; the condition below is known only at run time)
        if (place < end) | (worker == 0):
            gdc_wait()

    while place < end:
        seq_len = tl.load(seq_lens_ptr + row)
        count = tl.maximum(tl.cdiv(seq_len, BLOCK), 1)
        from_block = place - begin
        to_block = tl.minimum(count, end - begin)
        position = from_block * BLOCK
        pages = page_ids(page_table_ptr, row, table_stride, position + runs, seq_len, PAGE)
        q_rows = q_ptr + row.to(tl.int64) * q_stride + head[:, None] * WIDTH
        row_scale = tl.full([GROUP_PAD], scale, tl.float32)
        # Latents are the rows of every product and queries, which are few, its columns.
        q_turned = tl.load(q_rows + RANK + turned[None, :], mask=known[:, None] & (turned < TURNED)[None, :], other=0.0)
        q = tl.load(q_rows + columns[None, :], mask=known[:, None] & (columns < RANK)[None, :], other=0.0)
        if CODES and q.dtype == tl.bfloat16:
            q, q_turned, power = pair_in_float16(q, q_turned)
            row_scale = tl.maximum(row_scale * power, LEAST)
        if CODES:
            q_0, q_1 = tl.split(tl.reshape(q, [GROUP_PAD, RANK_PAD // 2, 2]))
            q_0, q_1 = tl.trans(q_0), tl.trans(q_1)
        q, q_turned = tl.trans(q), tl.trans(q_turned)
        best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK, GROUP_PAD], tl.float32)
        acc = tl.zeros([RANK_PAD, GROUP_PAD], tl.float32)
        acc_0 = tl.zeros([RANK_PAD // 2, GROUP_PAD], tl.float32)
        acc_1 = acc_0
        for _step in tl.range(from_block, to_block, num_stages=STAGES):
            positions = position + tl.arange(0, BLOCK)
            visible = positions < seq_len
            if WIDE:
                pages = pages.to(tl.int64)
            run_slots = pages * PAGE if RUN == PAGE else pages * PAGE + (position + runs) % PAGE
            slots = tl.reshape(run_slots[:, None] + tl.arange(0, RUN)[None, :], [BLOCK])
            # Load page ids one block ahead, so that the copies never wait for their addresses.
            position += BLOCK
            pages = page_ids(page_table_ptr, row, table_stride, position + runs, seq_len, PAGE)
            # Mask hidden latents: a page may hold an old NaN, and NaN times a weight of zero is NaN.
            if CODES:
                inside = visible[:, None] if RANK == RANK_PAD else visible[:, None] & (2 * half < RANK)[None, :]
                pairs = tl.load(cache_pairs + (slots * (WIDTH // 2))[:, None] + half[None, :], mask=inside, other=0)
                latent_0, latent_1 = code_pairs(pairs, q_0.dtype, ASM)
                scores = tl.dot(latent_0, q_0, input_precision=PRECISION)
                scores = tl.dot(latent_1, q_1, scores, input_precision=PRECISION)
            else:
                inside = visible[:, None] if RANK == RANK_PAD else visible[:, None] & (columns < RANK)[None, :]
                latent = tl.load(cache_ptr + (slots * WIDTH)[:, None] + columns[None, :], mask=inside, other=0.0)
                scores = tl.dot(latent, q, input_precision=PRECISION)
            inside = visible[:, None] if TURNED == TURNED_PAD else visible[:, None] & (turned < TURNED)[None, :]
            key = tl.load(cache_ptr + (slots * WIDTH)[:, None] + RANK + turned[None, :], mask=inside, other=0.0)
            key = key.to(q_turned.dtype)
            scores = tl.dot(key, q_turned, scores, input_precision=PRECISION)
            seen = visible[:, None]
            if QUERIES > 1:
                seen = positions[:, None] < (seq_len - (QUERIES - 1) + queries)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            best, totals, shrink, weights = softmax_step_transposed(scores, row_scale, best, totals)
            weights = weights.to(key.dtype)
            if CODES:
                acc_0 = tl.dot(tl.trans(latent_0), weights, acc_0 * shrink[None, :], input_precision=PRECISION)
                acc_1 = tl.dot(tl.trans(latent_1), weights, acc_1 * shrink[None, :], input_precision=PRECISION)
            else:
                acc = tl.dot(tl.trans(latent), weights, acc * shrink[None, :], input_precision=PRECISION)

        total = tl.sum(totals, axis=0)
        acc = tl.interleave(tl.trans(acc_0), tl.trans(acc_1)) if CODES else tl.trans(acc)
        if (from_block == 0) & (to_block == count):
            safe = divisor(total, cache_ptr, value_scale)
            out = out_ptr + (row.to(tl.int64) * heads + head)[:, None] * RANK + columns[None, :]
            inside = known[:, None] & (columns < RANK)[None, :]
            tl.store(out, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
        else:
            # A worker starts at most one row that it does not end (slot 1), and continues at most one that it did not
            # start (slot 0).
            slot = (2 * worker + (from_block == 0).to(tl.int32)) * TILES + tile
            store_part(part_ptr, weight_ptr, slot, best, total, acc, GROUP, RANK_PAD)
        place = begin + to_block
        begin += count
        row += 1


@keep_variants
@triton.jit(do_not_specialize=["rows", "workers"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _merge_kernel(
    part_ptr,
    weight_ptr,
    out_ptr,
    seq_lens_ptr,
    value_scale,
    rows,
    heads,
    workers,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a tile that a program merges
    COLUMNS: tl.constexpr,  # columns of each head that a program merges
    PARTS: tl.constexpr,  # added up in one step
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    spans: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile = tl.program_id(1) // spans
    head = tl.program_id(1) % spans * HEADS + tl.arange(0, HEADS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    counts = _block_counts(seq_lens_ptr, rows, ROWS_PAD, BLOCK)
    share = tl.cdiv(tl.sum(counts, axis=0), workers)
    index = tl.arange(0, ROWS_PAD)
    begin = tl.sum(tl.where(index < row, counts, 0), axis=0)
    count = tl.sum(tl.where(index == row, counts, 0), axis=0)
    if count > 0:
        first = begin // share
        parts = (begin + count - 1) // share - first + 1
        if parts > 1:
            known = head < GROUP
            best = tl.full([HEADS], float("-inf"), tl.float32)
            total = tl.zeros([HEADS], tl.float32)
            acc = tl.zeros([HEADS, COLUMNS], tl.float32)
            for base in range(0, parts, PARTS):
                nth = base + tl.arange(0, PARTS)
                slot = (2 * (first + nth) + (nth == 0).to(tl.int32)) * TILES + tile
                inside = (nth < parts)[:, None] & known[None, :]
                weights = weight_ptr + slot[:, None] * 2 * GROUP + head[None, :]
                part_best = tl.load(weights, mask=inside, other=float("-inf"))
                part_total = tl.load(weights + GROUP, mask=inside, other=0.0)
                values = tl.load(
                    part_ptr + (slot[:, None] * GROUP + head[None, :])[:, :, None] * RANK_PAD + column[None, None, :],
                    mask=inside[:, :, None], other=0.0,
                )  # fmt: skip
                best, total, acc = merge_parts(best, total, acc, part_best, part_total, values)
            head += tile * GROUP
            out = out_ptr + (row.to(tl.int64) * heads + head)[:, None] * RANK + column[None, :]
            inside = (known & (head < heads))[:, None] & (column < RANK)[None, :]
            safe = tl.where(total == 0.0, 1.0, total) / value_scale  # zero for heads that do not exist
            tl.store(out, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


class LatentDecode:
    """The kernels and their scratch memory. All launches share the scratch, so they must be on one stream at a time."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        rank: int,
        page_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
        value_scale: float = 1.0,
        queries: int = 1,
    ) -> Tensor:
        """Return the attention of each row's queries over latents, [rows * queries, heads, rank].

        Args:
            q: [rows * queries, heads, width], heads contiguous; several queries of a row are contiguous, too.
            cache: [pages, page_size, 1, width], contiguous, in q's dtype, or FP8 if width and rank are even.
            rank: How many elements of a latent, the first ones, are its value.
            page_table: [rows, ...] int32.
            seq_lens: [rows] int32. Rows of length 0 give zeros. Rows of length -1 come last and give no results.
            scale: Above 0. With an FP8 cache it includes the scale of keys.
            value_scale: Value = code * value_scale in an FP8 cache; 1 for other caches.
            queries: As in `PagedDecode`.

        Needs no host sync. Raises ValueError for another layout.
        """
        tokens, heads, width = q.shape
        codes = cache.dtype == FP8
        if (cache.dtype != q.dtype and not codes) or cache.shape[2:] != (1, width) or (codes and (rank | width) % 2):
            raise ValueError(f"latents of {cache.dtype} {list(cache.shape[2:])} for queries of {q.dtype} [{width}]")
        if not (cache.is_contiguous() and q.stride(1) == width and q.stride(2) == 1):
            raise ValueError("q and the cache must be contiguous")
        rows = tokens // queries
        if queries > 1 and (rows * queries != tokens or not q.is_contiguous()):
            raise ValueError(f"q must be contiguous, with {queries} tokens of each row, got {tokens}")
        if out is None:
            out = q.new_empty(tokens, heads, rank)
        if rows == 0:
            return out
        heads *= queries
        launch, size = launch_for(q.device), q.element_size()
        group = tile_heads(heads, size)
        tiles, group_pad = -(-heads // group), max(16, power_of_two(group))
        rank_pad = max(32 if codes else 16, power_of_two(rank))
        turned_pad = max(16, power_of_two(width - rank))
        config = latent_decode_config(rows, group_pad, rank_pad + turned_pad, size, launch, codes)
        workers = max(1, launch.processors * config.crowd // tiles)
        parts, weights = self._scratch_for(q.device, workers, tiles, group, rank_pad)
        page_size = cache.shape[1]
        rows_pad = max(64, power_of_two(rows))
        _decode_kernel[(workers * tiles,)](
            q, cache, out, page_table, seq_lens, parts, weights,
            rows, heads, page_table.stride(0), q.stride(0) * queries, scale * LOG2_E, value_scale, workers,
            TILES=tiles, GROUP=group, QUERIES=queries, RANK=rank, TURNED=width - rank, PAGE=page_size,
            ROWS_PAD=rows_pad, GROUP_PAD=group_pad, RANK_PAD=rank_pad, TURNED_PAD=turned_pad,
            BLOCK=config.block, RUN=math.gcd(config.block, page_size), STAGES=config.stages,
            WIDE=cache.numel() >= 2**31, PRECISION="ieee" if size > 2 else "tf32",
            ASM=PAIRS_ASM if codes and launch.fp8 and size == 2 else "", OVERLAP=launch.overlap,
            num_warps=config.warps, launch_pdl=launch.overlap,
        )  # fmt: skip
        heads_each, columns = merge_spans(rows, rank_pad)
        grid = (rows, tiles * -(-group // heads_each), rank_pad // columns)
        _merge_kernel[grid](
            parts, weights, out, seq_lens, value_scale, rows, heads, workers,
            TILES=tiles, GROUP=group, RANK=rank, RANK_PAD=rank_pad, ROWS_PAD=rows_pad, BLOCK=config.block,
            HEADS=heads_each, COLUMNS=columns, PARTS=max(1, MERGED // (heads_each * columns)), OVERLAP=launch.overlap,
            num_warps=4, launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

    def _scratch_for(
        self, device: torch.device, workers: int, tiles: int, group: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        key = (device, workers, tiles, group, rank)
        if key not in self._scratch:
            self._scratch[key] = (
                torch.empty(2 * workers, tiles, group, rank, dtype=torch.float32, device=device),
                torch.empty(2 * workers, tiles, 2, group, dtype=torch.float32, device=device),
            )
        return self._scratch[key]
