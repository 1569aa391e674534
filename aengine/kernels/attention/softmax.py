"""Softmax over blocks of keys, and over the parts of rows that several programs compute.

Softmax is in base 2. A part of a row has its maximum (`best`), the total of its weights, and the weighted values
(`acc`).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

from aengine.kernels.attention.codes import divisor

LOG2_E = math.log2(math.e)


@triton.jit
def softmax_step(scores, best, total, acc):
    """Add a block of keys, scores [queries, keys], to a running softmax. Queries without a key stay at -inf and 0.

    Returns the new best and total, the scaled values so far, and the block's weights.
    """
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.math.exp2(best - safe)
    weights = tl.math.exp2(scores - safe[:, None])
    return new_best, total * shrink + tl.sum(weights, axis=1), acc * shrink[:, None], weights


@triton.jit
def softmax_step_transposed(scores, scale, best, totals):
    """Like `softmax_step`, with keys as rows. Queries without a key stay at -inf and 0.

    scores [keys, queries] are not multiplied by scale [queries] yet, but best [queries] is. totals [keys, queries] are
    summed over the keys only at the end. Returns the new best and totals, a factor for the values so far, and
    the block's weights.
    """
    new_best = tl.maximum(best, tl.max(scores, axis=0) * scale)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.math.exp2(best - safe)
    weights = tl.math.exp2(scores * scale[None, :] - safe[None, :])
    return new_best, totals * shrink[None, :] + weights, shrink, weights


@triton.jit
def spread_columns(columns, GROUP: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Return where the columns of a product are, in heads, relative to the first column.

    Columns are the GROUP heads of one query, then those of the next query, which are STRIDE heads further on.
    """
    places = columns
    if COLUMNS > GROUP:
        places = columns // GROUP * STRIDE + columns % GROUP
    return places


@triton.jit
def with_sink(best, total, sinks_ptr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the total [columns] of a softmax after adding each head's sink, a score without a value.

    Columns are the GROUP heads of one or several queries.
    """
    column = tl.arange(0, total.shape[0])
    place = spread_columns(column, GROUP, COLUMNS, 0)
    sink = tl.load(sinks_ptr + place, mask=column < COLUMNS, other=0.0) * 1.4426950408889634
    return total + tl.math.exp2(sink - best)


@triton.jit
def merge_parts(best, total, acc, part_best, part_total, values):
    """Add several parts [parts, MERGE_GROUP(, DIM)] of a softmax to a running one."""
    new_best = tl.maximum(best, tl.max(part_best, axis=0))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.math.exp2(best - safe)
    grow = tl.math.exp2(part_best - safe[None, :])
    total = total * shrink + tl.sum(part_total * grow, axis=0)
    return new_best, total, acc * shrink[:, None] + tl.sum(values * grow[:, :, None], axis=0)


@triton.jit
def take_share(counts, exists, worker, workers, LEAST: tl.constexpr):
    """Return a worker's share of the list of all rows' blocks.

    counts [rows]: blocks of each row. exists [rows]: mask of the rows. LEAST: the fewest blocks of a share.
    Returns the size of a share, the worker's first block and the end of its blocks in the list, the row of the
    first block, and the index in the list at which that row begins.
    """
    line = tl.sum(counts, axis=0)
    share = tl.cdiv(line, workers)
    if LEAST > 0:
        share = tl.maximum(share, LEAST)
    place = worker * share
    end = tl.minimum(place + share, line)
    before = tl.cumsum(counts, axis=0) <= place
    row = tl.sum((before & exists).to(tl.int32), axis=0)
    begin = tl.sum(tl.where(before, counts, 0), axis=0)
    return share, place, end, row, begin


@triton.jit
def span_blocks(seq_len, start, window, BLOCK: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the blocks (first, count) that the row's queries see. An empty sequence counts one block."""
    low = start
    if WINDOWED:
        low = tl.maximum(seq_len - window, low)
    first = low // BLOCK
    return first, tl.maximum(tl.cdiv(seq_len, BLOCK) - first, 1)


@triton.jit
def page_ids(page_table_ptr, row, table_stride, positions, seq_len, PAGE: tl.constexpr):
    """Return the pages of positions of a row; 0 from seq_len on."""
    return tl.load(
        page_table_ptr + row.to(tl.int64) * table_stride + positions // PAGE, mask=positions < seq_len, other=0
    )


@triton.jit
def first_rows(x, KEEP: tl.constexpr):
    """Return the first KEEP rows of x. KEEP and the number of rows are powers of two."""
    if len(x.shape) == 1:
        folded = tl.reshape(x, [x.shape[0] // KEEP, KEEP])
        chosen = (tl.arange(0, x.shape[0] // KEEP) == 0)[:, None]
    else:
        folded = tl.reshape(x, [x.shape[0] // KEEP, KEEP, x.shape[1]])
        chosen = (tl.arange(0, x.shape[0] // KEEP) == 0)[:, None, None]
    return tl.sum(tl.where(chosen, folded, 0.0), axis=0)


@triton.jit
def mask_padding(mask, columns, DIM: tl.constexpr):
    """Return the mask without padded columns from DIM on, if there are any."""
    inside = mask
    if columns.numel != DIM:
        inside = mask & (columns < DIM)
    return inside


@triton.jit
def store_part(part_ptr, weight_ptr, slot, best, total, acc, GROUP: tl.constexpr, DIM: tl.constexpr):
    group = tl.arange(0, acc.shape[0])
    columns = tl.arange(0, acc.shape[1])
    inside = group < GROUP
    place = part_ptr + (slot * GROUP + group)[:, None] * DIM + columns[None, :]
    tl.store(place, acc, mask=mask_padding(inside[:, None], columns[None, :], DIM))
    tl.store(weight_ptr + slot * 2 * GROUP + group, best, mask=inside)
    tl.store(weight_ptr + (slot * 2 + 1) * GROUP + group, total, mask=inside)


@triton.jit
def add_up_parts(
    part_ptr, weight_ptr, first_worker, first, count, stride, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MERGE_GROUP: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """Add up `count` parts of a row that are `stride` apart, from part `first` on."""
    group = tl.arange(0, MERGE_GROUP)
    columns = tl.arange(0, DIM_PAD)
    best = tl.full([MERGE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_GROUP], tl.float32)
    acc = tl.zeros([MERGE_GROUP, DIM_PAD], tl.float32)
    for base in range(0, count, MERGE):
        nth = base + tl.arange(0, MERGE)
        index = first + nth * stride
        slot = (2 * (first_worker + index) + (index == 0).to(tl.int32)) * KV_HEADS + head
        inside = (nth < count)[:, None] & (group < GROUP)[None, :]
        weights = weight_ptr + slot[:, None] * 2 * GROUP + group[None, :]
        # Other processors wrote these: do not read them from the first-level cache.
        part_best = tl.load(weights, mask=inside, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(weights + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
        values = tl.load(
            part_ptr + (slot[:, None] * GROUP + group[None, :])[:, :, None] * DIM + columns[None, None, :],
            mask=mask_padding(inside[:, :, None], columns[None, None, :], DIM), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        best, total, acc = merge_parts(best, total, acc, part_best, part_total, values)
    return best, total, acc


@triton.jit
def finish_row(
    out_ptr, v_ptr, value_scale, shared_out_ptr, shared_lse_ptr, row_heads, rows, start, best, total, acc,
    HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, MERGE_GROUP: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Merge the SHARED parts of the shared run into the row, and write the row. A part is a mean of weight 2 ** lse.

    The row's COLUMNS are the GROUP heads of one query, or of several if nothing is shared.
    """
    group = tl.arange(0, MERGE_GROUP)
    columns = tl.arange(0, acc.shape[1])
    if SHARED > 0:
        place = (tl.arange(0, SHARED)[:, None] * rows) * HEADS + row_heads + group[None, :]
        inside = (group < tl.where(start > 0, GROUP, 0))[None, :]
        lse = tl.load(shared_lse_ptr + place, mask=inside, other=float("-inf"))
        values = tl.load(
            shared_out_ptr + place[:, :, None] * DIM + columns[None, None, :],
            mask=mask_padding(inside[:, :, None], columns[None, None, :], DIM), other=0.0,
        )  # fmt: skip
        # The values of an empty part were not written.
        heavy = lse > float("-inf")
        values = tl.where(heavy[:, :, None], values, 0.0)
        best, total, acc = merge_parts(best, total, acc, lse, tl.where(heavy, 1.0, 0.0), values)
    safe_total = divisor(total, v_ptr, value_scale)
    out = out_ptr + (row_heads + spread_columns(group, GROUP, COLUMNS, HEADS))[:, None] * DIM + columns[None, :]
    inside = mask_padding((group < COLUMNS)[:, None], columns[None, :], DIM)
    tl.store(out, (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
