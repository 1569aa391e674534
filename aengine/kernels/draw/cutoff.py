"""Finds the lowest logit that top_k, top_p and min_p keep, for each row, without a sort.

1. range    reads the row and finds its highest and lowest finite logits. The last kept token is in this interval.
2. ladder   reads the row at most `LADDERS` times. Each time it tries three thresholds and keeps a quarter of the
            interval. It is skipped when at most `CANDIDATES` logits are left in the interval.
3. gather   reads the row once more, and writes these logits to a list.
4. finish   reads the list repeatedly, and keeps a quarter of the keys each time until a single key is left. Keys are
            integers with the order of the floats, so this always ends. If the interval is still too large (thousands of
            equal logits, or of tokens in top_k with a top_p), it reads the row itself.

The first three kernels divide a row into pieces, one for each program. The row's last program updates the interval. If
a row has no filters or needs no further pass, its programs end at once, so the host takes no decision. Integers are
summed (see `cutoff_search`), so a row's result does not depend on the batch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.draw.cutoff_search import key_of, last_kept, scale_of, share_of, tally
from aengine.kernels.launch import launch_for
from aengine.kernels.parts import is_last
from aengine.kernels.variants import keep_variants

LADDERS = 4
CANDIDATES = 4096
PIECES = 64  # the most pieces of a row
MOST_TOKENS = 2**19 - 1  # weights of more tokens might not fit into 64 bits
_PIECE_BLOCK = 1024
_LIST_BLOCK = 2048
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits of a float32


@triton.jit
def _piece(pieces, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's row, and the begin and end of its piece. The piece may end after the row."""
    length = tl.cdiv(VOCAB, pieces * BLOCK) * BLOCK
    begin = tl.program_id(0) % pieces * length
    return tl.program_id(0) // pieces, begin, begin + length


@triton.jit
def _load_interval(interval_ptr, row):
    at = interval_ptr + row * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _store_interval(interval_ptr, row, top, low, high):
    at = interval_ptr + row * 3
    tl.store(at, top)
    tl.store(at + 1, low)
    tl.store(at + 2, high)


@triton.jit
def _load_counts(counts_ptr, row):
    at = counts_ptr + row * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _store_counts(counts_ptr, row, k, from_low, from_high, weight_from_high, total):
    at = counts_ptr + row * 5
    tl.store(at, k)
    tl.store(at + 1, from_low)
    tl.store(at + 2, from_high)
    tl.store(at + 3, weight_from_high)
    tl.store(at + 4, total)


@triton.jit
def _candidates(k, top_p, from_low, from_high):
    """Return how many logits to list; 0 if the row needs no search.

    With both filters these are all logits from `low` on, because top_p is a share of the tokens that top_k keeps.
    """
    return tl.where((k > 0) & (top_p <= 1), from_low, from_low - from_high)


@keep_variants
@triton.jit(do_not_specialize=["parameter_stride", "pieces"])
def _range_kernel(
    logits_ptr,  # [rows, VOCAB]
    temperature_ptr,  # [rows] float32
    top_k_ptr,  # [rows] int32
    top_p_ptr,  # [rows] float32
    log_min_p_ptr,  # [rows] float32
    interval_ptr,  # [rows, 3] float32: the highest logit; the interval's ends, excluding the high one
    counts_ptr,  # [rows, 5] int64: k or 0; numbers of logits >= low, >= high; weights of the latter, of all
    ends_ptr,  # [rows, 2, PIECES] float32
    finite_ptr,  # [rows, PIECES] int32
    arrived_ptr,  # [rows] int32, zero between launches
    parameter_stride,
    pieces,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, begin, end = _piece(pieces, VOCAB, BLOCK)
    piece = tl.program_id(0) % pieces
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    temperature = tl.load(temperature_ptr + row * parameter_stride)
    top_k = tl.load(top_k_ptr + row * parameter_stride)
    top_p = tl.load(top_p_ptr + row * parameter_stride)
    log_min_p = tl.load(log_min_p_ptr + row * parameter_stride)
    if (temperature > 0) & ((top_k < VOCAB) | (top_p <= 1) | (log_min_p > float("-inf"))):
        logits = logits_ptr + row.to(tl.int64) * VOCAB
        lanes = tl.arange(0, BLOCK)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        finite = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
            x = tl.load(logits + start + lanes, mask=start + lanes < VOCAB, other=float("-inf")).to(tl.float32)
            highest = tl.maximum(highest, x, propagate_nan=tl.PropagateNan.ALL)
            lowest = tl.minimum(lowest, tl.where(x > float("-inf"), x, float("inf")))
            finite += (x > float("-inf")).to(tl.int32)
        ends = ends_ptr + row * 2 * PIECES
        # NaN becomes +inf; both make a row invalid.
        tl.store(ends + piece, tl.max(tl.where(highest < float("inf"), highest, float("inf"))))
        tl.store(ends + PIECES + piece, tl.min(lowest))
        tl.store(finite_ptr + row * PIECES + piece, tl.sum(finite))
        if is_last(arrived_ptr + row, pieces):
            slots = tl.arange(0, PIECES)
            used = slots < pieces
            # Other processors wrote these: do not read them from the first-level cache.
            tops = tl.load(ends + slots, mask=used, other=float("-inf"), cache_modifier=".cg")
            lows = tl.load(ends + PIECES + slots, mask=used, other=float("inf"), cache_modifier=".cg")
            counts = tl.load(finite_ptr + row * PIECES + slots, mask=used, other=0, cache_modifier=".cg")
            top, low, count = tl.max(tops), tl.min(lows), tl.sum(counts)
            k = tl.where((top_k < VOCAB) & (top_k <= count), top_k, 0)
            if (k == 0) & (count > CANDIDATES):
                # All tokens below this logit together have less probability than top_p removes.
                low = tl.maximum(low, top - temperature * (tl.log(VOCAB / tl.maximum(1 - top_p, 1e-30)) + 0.1))
            sound = top < float("inf")
            _store_interval(interval_ptr, row, tl.where(sound, top, float("-inf")), low, float("inf"))
            _store_counts(counts_ptr, row, k, tl.where(sound & ((k > 0) | (top_p <= 1)), count, 0), 0, 0, 0)
    elif piece == 0:
        _store_interval(interval_ptr, row, float("-inf"), float("-inf"), float("inf"))
        _store_counts(counts_ptr, row, 0, 0, 0, 0, 0)


@keep_variants
@triton.jit(do_not_specialize=["parameter_stride", "pieces"])
def _ladder_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    interval_ptr,
    counts_ptr,
    sums_ptr,  # [rows, 8] int64, zero between launches
    arrived_ptr,
    parameter_stride,
    pieces,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, begin, end = _piece(pieces, VOCAB, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    top_p = tl.load(top_p_ptr + row * parameter_stride)
    top, low, high = _load_interval(interval_ptr, row)
    k, from_low, from_high, weight_from_high, total = _load_counts(counts_ptr, row)
    if _candidates(k, top_p, from_low, from_high) > CANDIDATES:
        scale = scale_of(tl.load(temperature_ptr + row * parameter_stride))
        last = tl.minimum(high, top)
        t1 = low * 0.75 + last * 0.25  # never overflows
        t2 = low * 0.5 + last * 0.5
        t3 = low * 0.25 + last * 0.75
        logits = logits_ptr + row.to(tl.int64) * VOCAB
        n1, n2, n3, m1, m2, m3, m = tally(logits, begin, end, VOCAB, t1, t2, t3, k == 0, top, scale, BLOCK, STAGES)
        sums = sums_ptr + row * 8
        tl.atomic_add(sums, n1, sem="relaxed")
        tl.atomic_add(sums + 1, n2, sem="relaxed")
        tl.atomic_add(sums + 2, n3, sem="relaxed")
        tl.atomic_add(sums + 3, m1, sem="relaxed")
        tl.atomic_add(sums + 4, m2, sem="relaxed")
        tl.atomic_add(sums + 5, m3, sem="relaxed")
        tl.atomic_add(sums + 6, m, sem="relaxed")
        if is_last(arrived_ptr + row, pieces):
            n1, n2 = tl.load(sums, cache_modifier=".cg"), tl.load(sums + 1, cache_modifier=".cg")
            n3, m1 = tl.load(sums + 2, cache_modifier=".cg"), tl.load(sums + 3, cache_modifier=".cg")
            m2, m3 = tl.load(sums + 4, cache_modifier=".cg"), tl.load(sums + 5, cache_modifier=".cg")
            total = tl.load(sums + 6, cache_modifier=".cg")
            tl.debug_barrier()
            tl.store(sums + tl.arange(0, 8), tl.zeros([8], tl.int64))
            need = share_of(top_p, total)
            good1 = tl.where(k > 0, n1 >= k, m1 >= need)
            good2 = tl.where(k > 0, n2 >= k, m2 >= need)
            good3 = tl.where(k > 0, n3 >= k, m3 >= need)
            # The highest good threshold, and the lowest of the others.
            low = tl.where(good3, t3, tl.where(good2, t2, tl.where(good1, t1, low)))
            from_low = tl.where(good3, n3, tl.where(good2, n2, tl.where(good1, n1, from_low)))
            high = tl.where(good3, high, tl.where(good2, t3, tl.where(good1, t2, t1)))
            from_high = tl.where(good3, from_high, tl.where(good2, n3, tl.where(good1, n2, n1)))
            weight_from_high = tl.where(good3, weight_from_high, tl.where(good2, m3, tl.where(good1, m2, m1)))
            _store_interval(interval_ptr, row, top, low, high)
            _store_counts(counts_ptr, row, k, from_low, from_high, weight_from_high, total)


@keep_variants
@triton.jit(do_not_specialize=["parameter_stride", "pieces"])
def _gather_kernel(
    logits_ptr,
    top_p_ptr,
    interval_ptr,
    counts_ptr,
    list_ptr,  # [rows, CANDIDATES] float32
    listed_ptr,  # [rows] int32, zero between calls
    parameter_stride,
    pieces,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, begin, end = _piece(pieces, VOCAB, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    top_p = tl.load(top_p_ptr + row * parameter_stride)
    _, low, high = _load_interval(interval_ptr, row)
    k, from_low, from_high, _, _ = _load_counts(counts_ptr, row)
    candidates = _candidates(k, top_p, from_low, from_high)
    if (candidates > 0) & (candidates <= CANDIDATES):
        high = tl.where((k > 0) & (top_p <= 1), float("inf"), high)
        logits = logits_ptr + row.to(tl.int64) * VOCAB
        lanes = tl.arange(0, BLOCK)
        for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
            x = tl.load(logits + start + lanes, mask=start + lanes < VOCAB, other=float("-inf")).to(tl.float32)
            chosen = (x >= low) & (x < high)
            # The order of the list does not matter. It has as many logits as were counted, so they fit. The mask
            # protects against a compiler that rounds the interval's ends differently here.
            place = tl.atomic_add(listed_ptr + row + lanes * 0, 1, mask=chosen, sem="relaxed")
            tl.store(list_ptr + row * CANDIDATES + place, x, mask=chosen & (place < CANDIDATES))


@keep_variants
@triton.jit(do_not_specialize=["parameter_stride"])
def _finish_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    log_min_p_ptr,
    interval_ptr,
    counts_ptr,
    list_ptr,
    listed_ptr,
    floor_ptr,  # [rows] float32
    parameter_stride,
    VOCAB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    temperature = tl.load(temperature_ptr + row * parameter_stride)
    top_p = tl.load(top_p_ptr + row * parameter_stride)
    log_min_p = tl.load(log_min_p_ptr + row * parameter_stride)
    top, low, high = _load_interval(interval_ptr, row)
    k, from_low, from_high, weight_from_high, total = _load_counts(counts_ptr, row)
    candidates = _candidates(k, top_p, from_low, from_high)
    floor = float("-inf")
    if candidates > 0:
        scale = scale_of(temperature)
        # The logits' dtype may not have the values of the ends, so extend the interval by one key on either side.
        low_key, high_key = key_of(low, SHIFT) - 1, key_of(tl.minimum(high, top), SHIFT) + 1
        if candidates <= CANDIDATES:
            size = tl.minimum(tl.load(listed_ptr + row), CANDIDATES)
            tl.debug_barrier()
            tl.store(listed_ptr + row, 0)
            all_above = (k > 0) & (top_p <= 1)
            floor = last_kept(
                list_ptr + row * CANDIDATES, size, low_key, high_key, k, top_p, total,
                tl.where(all_above, 0, from_high), tl.where(all_above, 0, weight_from_high), top, scale,
                SHIFT, BLOCK, STAGES,
            )  # fmt: skip
        else:
            logits = logits_ptr + row.to(tl.int64) * VOCAB
            floor = last_kept(
                logits, VOCAB, low_key, high_key, k, top_p, total, 0, 0, top, scale, SHIFT, BLOCK, STAGES
            )  # fmt: skip
    if log_min_p > float("-inf"):
        floor = tl.maximum(floor, top + temperature * log_min_p)
    tl.store(floor_ptr + row, floor)


class Cutoff:
    """The kernels and their scratch memory, 18 KB a row. Calls share the scratch, so they must be on one stream."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        self._interval = scratch(3, dtype=torch.float32)
        self._counts = scratch(5, dtype=torch.int64)
        self._ends = scratch(2, PIECES, dtype=torch.float32)
        self._finite = scratch(PIECES, dtype=torch.int32)
        self._sums = scratch(8, dtype=torch.int64)
        self._arrived = scratch(dtype=torch.int32)
        self._list = scratch(CANDIDATES, dtype=torch.float32)
        self._listed = scratch(dtype=torch.int32)

    def __call__(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
        """Return the lowest logit that passes each row's filters, [rows] float32. Equal logits pass as well.

        It is -inf for rows without filters, which are not read, and for rows with NaN or +inf.

        Args:
            logits: [rows, vocab] float32, bfloat16 or float16, contiguous; only read.
            temperature: float32. At 0 a row has no filters. All parameters are [rows] and have the same stride.
            top_k: int32. vocab or more turns it off.
            top_p: float32. Values above 1 turn it off.
            log_min_p: float32. -inf turns it off.

        Raises ValueError if the vocabulary has more than `MOST_TOKENS` tokens.
        """
        rows, vocab = logits.shape
        if vocab > MOST_TOKENS:
            raise ValueError(f"logits: {vocab} tokens a row, but no more than {MOST_TOKENS} weights can be added up")
        floor = torch.empty(rows, dtype=torch.float32, device=logits.device)
        if rows == 0:
            return floor
        launch = launch_for(logits.device)
        # With so many programs, little of the device is idle while the last ones run.
        pieces = min(PIECES, -(-vocab // _PIECE_BLOCK), -(-16 * launch.processors // rows))
        grid, stride = (rows * pieces,), temperature.stride(0)
        common = {"VOCAB": vocab, "CANDIDATES": CANDIDATES, "OVERLAP": launch.overlap, "launch_pdl": launch.overlap}
        cut = {**common, "BLOCK": _PIECE_BLOCK, "STAGES": 3, "num_warps": 4}
        _range_kernel[grid](
            logits, temperature, top_k, top_p, log_min_p, self._interval, self._counts, self._ends, self._finite,
            self._arrived, stride, pieces, PIECES=PIECES, **cut,
        )  # fmt: skip
        for _ in range(LADDERS):
            _ladder_kernel[grid](
                logits, temperature, top_p, self._interval, self._counts, self._sums, self._arrived, stride, pieces,
                **cut, maxnreg=64,  # eight programs a processor
            )  # fmt: skip
        _gather_kernel[grid](
            logits, top_p, self._interval, self._counts, self._list, self._listed, stride, pieces, **cut
        )
        _finish_kernel[(rows,)](
            logits, temperature, top_p, log_min_p, self._interval, self._counts, self._list, self._listed, floor,
            stride, SHIFT=_UNUSED_BITS[logits.dtype], BLOCK=_LIST_BLOCK,
            STAGES=1,  # without a pipeline, because the list fits the first-level cache
            num_warps=8, maxnreg=128,  # two programs a processor
            enable_fp_fusion=False,  # round the product before the sum, like the reference
            **common,
        )  # fmt: skip
        return floor
