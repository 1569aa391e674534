"""Parts of one row's attention that several programs computed: each is stored, the last of them adds them up."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.attention.codes import divisor
from aengine.kernels.attention.softmax import merge_parts


@triton.jit
def unpadded(x, KEEP: tl.constexpr):
    """The first KEEP of x's rows; KEEP and their number are powers of two."""
    if len(x.shape) == 1:
        folded = tl.reshape(x, [x.shape[0] // KEEP, KEEP])
        chosen = (tl.arange(0, x.shape[0] // KEEP) == 0)[:, None]
    else:
        folded = tl.reshape(x, [x.shape[0] // KEEP, KEEP, x.shape[1]])
        chosen = (tl.arange(0, x.shape[0] // KEEP) == 0)[:, None, None]
    return tl.sum(tl.where(chosen, folded, 0.0), axis=0)


@triton.jit
def in_both(mask, columns, DIM: tl.constexpr):
    """The mask, where a head's columns are padded without those beyond DIM."""
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
    tl.store(place, acc, mask=in_both(inside[:, None], columns[None, :], DIM))
    tl.store(weight_ptr + slot * 2 * GROUP + group, best, mask=inside)
    tl.store(weight_ptr + (slot * 2 + 1) * GROUP + group, total, mask=inside)


@triton.jit
def is_last(arrived, expected):
    """Announce what this program has stored: is it the last of so many? Then the counter is zero again."""
    tl.debug_barrier()  # every thread's share is stored before one of them announces it
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == expected - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived, 0)
    return last


@triton.jit
def add_up_parts(
    part_ptr, weight_ptr, first_worker, first, count, stride, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MERGE_GROUP: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """Of a row's parts, `count` that are `stride` apart, from part `first` on."""
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
        # Other processors wrote these: read past the first-level cache.
        part_best = tl.load(weights, mask=inside, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(weights + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
        values = tl.load(
            part_ptr + (slot[:, None] * GROUP + group[None, :])[:, :, None] * DIM + columns[None, None, :],
            mask=in_both(inside[:, :, None], columns[None, None, :], DIM), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        best, total, acc = merge_parts(best, total, acc, part_best, part_total, values)
    return best, total, acc


@triton.jit
def finish_row(
    out_ptr, v_ptr, value_scale, shared_out_ptr, shared_lse_ptr, row_heads, rows, start, best, total, acc,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, MERGE_GROUP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Fold in the shared positions' SHARED parts, each of weight 2 ** lse and divided by it, and write the row."""
    group = tl.arange(0, MERGE_GROUP)
    columns = tl.arange(0, acc.shape[1])
    if SHARED > 0:
        place = (tl.arange(0, SHARED)[:, None] * rows) * HEADS + row_heads + group[None, :]
        inside = (group < tl.where(start > 0, GROUP, 0))[None, :]
        lse = tl.load(shared_lse_ptr + place, mask=inside, other=float("-inf"))
        values = tl.load(
            shared_out_ptr + place[:, :, None] * DIM + columns[None, None, :],
            mask=in_both(inside[:, :, None], columns[None, None, :], DIM), other=0.0,
        )  # fmt: skip
        # A part that was empty left its values unwritten.
        heavy = lse > float("-inf")
        values = tl.where(heavy[:, :, None], values, 0.0)
        best, total, acc = merge_parts(best, total, acc, lse, tl.where(heavy, 1.0, 0.0), values)
    safe_total = divisor(total, v_ptr, value_scale)
    out = out_ptr + (row_heads + group)[:, None] * DIM + columns[None, :]
    inside = in_both((group < GROUP)[:, None], columns[None, :], DIM)
    tl.store(out, (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
