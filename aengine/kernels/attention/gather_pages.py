"""Copies K and V of sequences from their pages into contiguous memory, which prefill attention reads fastest."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.attention.config import LEAST_SEQUENCES
from aengine.kernels.launch import power_of_two
from aengine.kernels.variants import keep_variants

# A kernel that reads whole tiles of keys reads up to GAP tokens past a sequence's end. These must not belong to
# another sequence, because a NaN times a weight of zero is NaN.
GAP = 176
TILE = 16


@dataclass(slots=True)
class GatherPlan:
    """The positions of each sequence's copy. All layers of a step share it."""

    skipped_pages: Tensor  # [seqs] int32: leading pages of each sequence that are not copied
    first_pages: Tensor  # [seqs + 1] int32: the first page of each sequence's copy, and the total of pages
    starts: Tensor  # [seqs + 1] int32: `first_pages` in tokens
    lens: Tensor  # [seqs] int32: how many tokens of each sequence are copied


def gathered_tokens(length: int, page_size: int) -> int:
    """Return how many tokens a sequence occupies in the copies, including the gap after it."""
    return (-(-length // page_size) + -(-GAP // page_size)) * page_size if length else 0


def plan_gather(seq_lens: Tensor, unseen: Tensor, page_size: int) -> GatherPlan:
    """Plan the copies of all sequences, without a host sync.

    seq_lens: [seqs] int32. Sequences of length 0 occupy nothing. unseen: [seqs] int32, leading tokens that no query
    sees because of a window.
    """
    skipped_pages = unseen // page_size
    lens = seq_lens - skipped_pages * page_size
    pages = torch.where(lens > 0, (lens + (page_size - 1)) // page_size + -(-GAP // page_size), 0)
    first_pages = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    return GatherPlan(skipped_pages, first_pages, first_pages * page_size, lens)


# These tensors are slices of a batch with any alignment, and are read one number at a time. So no variant is compiled
# for their alignment.
@keep_variants
@triton.jit(
    do_not_specialize=["table_stride", "seqs"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "skipped_pages_ptr", "first_pages_ptr"],
)
def _gather_kernel(
    k_ptr,  # [pages, PAGE, ROW]
    v_ptr,
    k_out_ptr,  # [programs * PAGE, ROW]
    v_out_ptr,
    table_ptr,  # [seqs, ...] int32
    seq_lens_ptr,  # [seqs] int32
    skipped_pages_ptr,  # [seqs] int32
    first_pages_ptr,  # [seqs + 1] int32
    table_stride,
    seqs,
    value_scale,  # of FP8 pages
    SEQS_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    ROW_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    page_out = tl.program_id(0)
    if page_out < tl.load(first_pages_ptr + seqs):
        all_seqs = tl.arange(0, SEQS_PAD)
        exists = all_seqs < seqs
        ends = tl.load(first_pages_ptr + 1 + all_seqs, mask=exists, other=0x7FFFFFFF)
        seq = tl.sum((exists & (ends <= page_out)).to(tl.int32), axis=0)
        page = page_out - tl.load(first_pages_ptr + seq) + tl.load(skipped_pages_ptr + seq)
        length = tl.load(seq_lens_ptr + seq)
        source = tl.load(table_ptr + seq.to(tl.int64) * table_stride + page, mask=page * PAGE < length, other=0)
        source = source.to(tl.int64)
        columns = tl.arange(0, ROW_PAD)[None, :]
        for base in tl.static_range(0, PAGE, TILE):
            token = base + tl.arange(0, TILE)
            inside = (token < PAGE)[:, None] & (columns < ROW)
            known = inside & (page * PAGE + token < length)[:, None]
            from_ = (source * PAGE + token)[:, None] * ROW + columns
            to = (page_out.to(tl.int64) * PAGE + token)[:, None] * ROW + columns
            k = tl.load(k_ptr + from_, mask=known, other=0.0)
            v = tl.load(v_ptr + from_, mask=known, other=0.0)
            if k_ptr.dtype.element_ty.is_fp8():
                k = k.to(k_out_ptr.dtype.element_ty)
                v = (v.to(tl.float32) * value_scale).to(v_out_ptr.dtype.element_ty)
            tl.store(k_out_ptr + to, k, mask=inside)
            tl.store(v_out_ptr + to, v, mask=inside)


def gather_pages(
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    plan: GatherPlan,
    k_out: Tensor,
    v_out: Tensor,
    value_scale: float = 1.0,
) -> None:
    """Copy each sequence's K and V, except skipped pages, as `plan` says. Fill the gaps with zeros.

    Args:
        k_cache, v_cache: [pages, page_size, kv_heads, dim], contiguous.
        page_table: [seqs, ...] int32.
        seq_lens: [seqs] int32.
        k_out, v_out: [tokens, kv_heads, dim], contiguous, large enough for all copies, which is not checked. They have
            the caches' dtype. If the caches are FP8, they may have another. Then keys are the codes, not scaled, and
            values are the codes times `value_scale`.
    """
    page_size = k_cache.shape[1]
    row = k_cache.shape[2] * k_cache.shape[3]
    seqs = len(seq_lens)
    _gather_kernel[(len(k_out) // page_size,)](
        k_cache, v_cache, k_out, v_out, page_table, seq_lens, plan.skipped_pages, plan.first_pages,
        page_table.stride(0), seqs, value_scale,
        SEQS_PAD=max(LEAST_SEQUENCES, power_of_two(seqs)), PAGE=page_size, ROW=row, ROW_PAD=power_of_two(row),
        TILE=TILE, num_warps=8,
    )  # fmt: skip
