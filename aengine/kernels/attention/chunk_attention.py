"""Attention of prefill chunks over pages, for layers that flash kernels do not support.

Such layers have latents, other head dims, or scores with a softcap or sinks. For tokens of images that also see later
ones, it replaces the results of other kernels. The rows of a tile are the query heads of one KV head for neighbouring
tokens. With latents, all query heads share one KV head. Each latent is read once, as the key; its first elements are
the value.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.attention.codes import LEAST, divisor, pair_in_float16
from aengine.kernels.attention.config import LEAST_SEQUENCES, chunk_config, chunk_rows
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.attention.softmax import LOG2_E, softmax_step
from aengine.kernels.kv_scales import FP8
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(
    do_not_specialize=["seqs", "table_stride", "tiles", "window"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr", "starts_ptr", "sinks_ptr", "ends_ptr"],
)
def _chunks_kernel(
    q_ptr,  # [tokens, KV_HEADS * GROUP, DIM + MORE]
    k_ptr,  # [pages, PAGE, KV_HEADS, DIM + MORE]
    v_ptr,  # [pages, PAGE, KV_HEADS, DIM], with VALUES
    out_ptr,  # [tokens, KV_HEADS * GROUP, DIM]
    page_table_ptr,  # [seqs, ...] int32
    seq_lens_ptr,  # [seqs] int32: context lengths, which include the queries
    starts_ptr,  # [seqs + 1] int32: the first query token of each sequence
    sinks_ptr,  # [KV_HEADS * GROUP] float32, with SINKS
    ends_ptr,  # [tokens] int64, with ENDS: how many positions a token sees; 0: its result is not written
    seqs,
    tiles,
    table_stride,
    q_stride,
    window,
    scale,
    value_scale,
    cap,  # with SOFTCAP, in base 2 as `scale`
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,  # of values; of keys, the first DIM elements
    MORE: tl.constexpr,  # further elements of keys
    VALUES: tl.constexpr,  # values are not the first part of keys
    PAGE: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    MORE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,  # neighbouring keys of a block that share a page
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ENDS: tl.constexpr,
    WIDE: tl.constexpr,  # the caches have 2 ** 31 elements or more
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    WIDTH: tl.constexpr = DIM + MORE
    kv_head = tl.program_id(0) % KV_HEADS
    place = tiles - 1 - tl.program_id(0) // KV_HEADS  # the last tiles usually see the most keys, so they begin first
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # before `starts` is read, because outside of graphs the first layer computes it
    # Find the sequence and its tile. The tiles of all sequences are numbered in order.
    index = tl.arange(0, SEQS_PAD)
    exists = index < seqs
    first_token = tl.load(starts_ptr + index, mask=exists, other=0)
    counts = tl.cdiv((tl.load(starts_ptr + 1 + index, mask=exists, other=0) - first_token) * GROUP, BLOCK_M)
    before = (tl.cumsum(counts, axis=0) <= place) & exists
    seq = tl.sum(before.to(tl.int32), axis=0)
    nth = place - tl.sum(tl.where(before, counts, 0), axis=0)
    if seq < seqs:
        start = tl.load(starts_ptr + seq)
        tokens = tl.load(starts_ptr + seq + 1) - start
        context = tl.load(seq_lens_ptr + seq)
        row = nth * BLOCK_M + tl.arange(0, BLOCK_M)
        used = row < tokens * GROUP
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        own = context - tokens + token  # the row's position
        last = own  # the last position that the row sees
        most = tl.minimum(context - tokens + (nth * BLOCK_M + BLOCK_M - 1) // GROUP + 1, context)
        if ENDS:
            end = tl.minimum(tl.load(ends_ptr + start + token, mask=used, other=0).to(tl.int32), context)
            used &= end > 0
            last = end - 1
            most = tl.max(end, axis=0)
        low = 0
        if WINDOWED:
            low = tl.maximum(context - tokens + nth * BLOCK_M // GROUP - window + 1, 0) // BLOCK * BLOCK

        columns = tl.arange(0, DIM_PAD)
        runs = tl.arange(0, BLOCK // RUN) * RUN
        more = tl.arange(0, MORE_PAD)
        q_rows = q_ptr + ((start + token).to(tl.int64) * q_stride + head * WIDTH)[:, None]
        q = tl.load(q_rows + columns[None, :], mask=used[:, None] & (columns < DIM)[None, :], other=0.0)
        if MORE:
            q_more = tl.load(q_rows + DIM + more[None, :], mask=used[:, None] & (more < MORE)[None, :], other=0.0)
        else:
            q_more = q
        row_scale = tl.full([BLOCK_M], scale, tl.float32)
        if k_ptr.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16:  # FP8 to bfloat16 takes several instructions
            q, q_more, power = pair_in_float16(q, q_more)
            row_scale = tl.maximum(row_scale * power, LEAST)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        table = page_table_ptr + seq.to(tl.int64) * table_stride
        position = low
        pages = tl.load(table + (position + runs) // PAGE, mask=position + runs < most, other=0)
        for _step in tl.range(low, most, BLOCK, num_stages=STAGES):
            at = position + tl.arange(0, BLOCK)
            if WIDE:
                pages = pages.to(tl.int64)
            run_slots = pages * PAGE if RUN == PAGE else pages * PAGE + (position + runs) % PAGE
            slots = tl.reshape(run_slots[:, None] + tl.arange(0, RUN)[None, :], [BLOCK])
            slots = (slots * KV_HEADS + kv_head)[:, None]
            # Load page ids one block ahead, so that the copies never wait for their addresses.
            position += BLOCK
            pages = tl.load(table + (position + runs) // PAGE, mask=position + runs < most, other=0)
            # Mask hidden values: a page may hold an old NaN, and NaN times a weight of zero is NaN.
            visible = (at < most)[:, None]
            inside = visible if DIM == DIM_PAD else visible & (columns < DIM)[None, :]
            k = tl.load(k_ptr + slots * WIDTH + columns[None, :], mask=inside, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if MORE:
                inside_more = visible if MORE == MORE_PAD else visible & (more < MORE)[None, :]
                k_more = tl.load(k_ptr + slots * WIDTH + DIM + more[None, :], mask=inside_more, other=0.0)
                k_more = k_more.to(q.dtype)
                scores = tl.dot(q_more, tl.trans(k_more), scores, input_precision=PRECISION)
            if SOFTCAP:
                scores = (2 * tl.sigmoid(2 * scores * (row_scale / cap)[:, None]) - 1) * cap  # the hyperbolic tangent
            else:
                scores *= row_scale[:, None]
            seen = at[None, :] <= last[:, None]
            if WINDOWED:
                seen &= at[None, :] > own[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
            best, total, acc, weights = softmax_step(scores, best, total, acc)
            v = k
            if VALUES:
                v = tl.load(v_ptr + slots * DIM + columns[None, :], mask=inside, other=0.0).to(q.dtype)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)

        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=used, other=0.0) * 1.4426950408889634
            total += tl.math.exp2(sink - tl.where(best == float("-inf"), 0.0, best))
        safe = divisor(total, v_ptr, value_scale)
        out = out_ptr + ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * DIM + columns[None, :]
        inside = used[:, None] & (columns < DIM)[None, :]
        tl.store(out, (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def attend_chunks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    window: int | None = None,
    scores: Scores = PLAIN,
    out: Tensor | None = None,
    value_scale: float = 1.0,
    ends: Tensor | None = None,
) -> Tensor:
    """Return the attention of each sequence's queries, [tokens, heads, dim]. Queries are the last tokens of a context.

    Args:
        q: [tokens, heads, width], heads contiguous.
        k_cache: [pages, page_size, kv_heads, width], contiguous, in q's dtype or FP8.
        v_cache: Like k_cache, or a view of the first dim < width elements of each key.
        page_table: [seqs, ...] int32.
        seq_lens: [seqs] int32, the context lengths.
        query_starts: [seqs + 1] int32, the first token of each sequence. Results of other tokens are not written.
        scale: Greater than 0. With FP8 caches it includes the scale of keys.
        scores: The softcap and the sinks.
        value_scale: Value = code * value_scale in FP8 caches.
        ends: [tokens] int64: how many positions of its context a token sees. It sees its own and all earlier ones that
            the window does not hide. The results of tokens with 0 are not written. None: tokens see no later ones.

    Needs no host sync. Raises ValueError for another layout.
    """
    tokens, heads, width = q.shape
    page_size, kv_heads, dim = v_cache.shape[1:]
    if k_cache.dtype not in (q.dtype, FP8) or v_cache.dtype != k_cache.dtype or k_cache.shape[2:] != (kv_heads, width):
        raise ValueError(f"keys of {k_cache.dtype} {list(k_cache.shape[2:])} for queries of {q.dtype} [{width}]")
    values = dim == width
    if not (k_cache.is_contiguous() and q.stride(1) == width and q.stride(2) == 1) or (
        not v_cache.is_contiguous() if values else v_cache.stride() != k_cache.stride()
    ):
        raise ValueError("q and the KV caches must be contiguous")
    if out is None:
        out = q.new_empty(tokens, heads, dim)
    if not tokens:
        return out
    seqs, size, group, launch = len(seq_lens), q.element_size(), heads // kv_heads, launch_for(q.device)
    dim_pad, more_pad = max(16, power_of_two(dim)), max(16, power_of_two(max(1, width - dim)))
    height = chunk_rows(size, launch)
    config = chunk_config(height, dim_pad + more_pad, dim_pad * values, size, launch)
    tiles = -(-tokens * group // height) + seqs  # one tile of every sequence may be partly empty
    _chunks_kernel[(tiles * kv_heads,)](
        q, k_cache, v_cache, out, page_table, seq_lens, query_starts,
        seq_lens if scores.sinks is None else scores.sinks, seq_lens if ends is None else ends,
        seqs, tiles, page_table.stride(0), q.stride(0), window or 0, scale * LOG2_E, value_scale,
        (scores.softcap or 0.0) * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, MORE=width - dim, VALUES=values, PAGE=page_size,
        SEQS_PAD=max(LEAST_SEQUENCES, power_of_two(seqs)), DIM_PAD=dim_pad, MORE_PAD=more_pad, BLOCK_M=height,
        BLOCK=config.block, RUN=math.gcd(config.block, page_size), STAGES=config.stages, WINDOWED=window is not None,
        SOFTCAP=scores.softcap is not None, SINKS=scores.sinks is not None, ENDS=ends is not None,
        WIDE=k_cache.numel() >= 2**31, PRECISION="ieee" if size > 2 else "tf32", OVERLAP=launch.overlap,
        num_warps=config.warps, launch_pdl=launch.overlap,
    )  # fmt: skip
    return out
