"""Searches for the last token that top_k and top_p keep: device functions for the kernels of `cutoff`.

A threshold is good if enough tokens (top_k) or enough probability (top_p) are at or above it. The search tries three
thresholds at a time for the highest good one. Probabilities are integers in units of 2**-44 of the highest one.
So sums do not depend on their order, and all steps of the search agree exactly.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Return int64 keys with the order of the floats. SHIFT: low bits of float32 that the logits' dtype never uses."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Return the float32 of a key."""
    bits = (key << SHIFT).to(tl.int32)
    bits |= (bits >> 31) & ((1 << SHIFT) - 1)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(temperature):
    """Return log2(e) / temperature; never inf, because inf times 0 is NaN."""
    return 1.4426950408889634 / tl.maximum(temperature, 1e-38)


@triton.jit
def weight_of(x, top, scale):
    """Return exp((x - top) / temperature) in units of 2**-44, int64."""
    return (tl.exp2((x - top) * scale) * (2.0**44)).to(tl.int64)


@triton.jit
def share_of(top_p, total):
    """Return the weight that is enough for top_p: at least 1, so that a token is kept, and at most the total."""
    share = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(share, total), 1)


@triton.jit
def tally(values, begin, end, size, t1, t2, t3, weigh, top, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Count values[begin:min(end, size)] that are at least t1, t2 and t3; with `weigh`, also add up weights.

    Returns seven int64: three counts, their three weights, and the weight of all values. begin is a multiple of BLOCK.
    """
    # A thread loads WIDE neighbours at once, and adds these up by itself.
    WIDE: tl.constexpr = 128 // values.dtype.element_ty.primitive_bitwidth
    lanes = tl.arange(0, BLOCK // WIDE)
    n1 = tl.zeros([BLOCK // WIDE], tl.int32)
    n2 = tl.zeros([BLOCK // WIDE], tl.int32)
    n3 = tl.zeros([BLOCK // WIDE], tl.int32)
    m1 = tl.zeros([BLOCK // WIDE], tl.int64)
    m2 = tl.zeros([BLOCK // WIDE], tl.int64)
    m3 = tl.zeros([BLOCK // WIDE], tl.int64)
    m = tl.zeros([BLOCK // WIDE], tl.int64)
    tile = lanes[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        x = tl.load(values + start + tile, mask=start + tile < size, other=float("-inf")).to(tl.float32)
        n1 += tl.sum((x >= t1).to(tl.int32), axis=1)
        n2 += tl.sum((x >= t2).to(tl.int32), axis=1)
        n3 += tl.sum((x >= t3).to(tl.int32), axis=1)
        if weigh:
            weight = weight_of(x, top, scale)
            m1 += tl.sum(tl.where(x >= t1, weight, 0), axis=1)
            m2 += tl.sum(tl.where(x >= t2, weight, 0), axis=1)
            m3 += tl.sum(tl.where(x >= t3, weight, 0), axis=1)
            m += tl.sum(weight, axis=1)
    n1, n2, n3 = tl.sum(n1).to(tl.int64), tl.sum(n2).to(tl.int64), tl.sum(n3).to(tl.int64)
    return n1, n2, n3, tl.sum(m1), tl.sum(m2), tl.sum(m3), tl.sum(m)


@triton.jit
def _narrow(
    values, size, low, high, k, need, more, more_weight, top, scale,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the highest good key. low must be good, and high must not be.

    A key is good if k tokens are at or above it. If k is 0, these tokens must have the weight `need` instead. more,
    more_weight: as in `last_kept`.
    """
    while high - low > 1:
        step = (high - low + 3) // 4
        t1, t2, t3 = value_of(low + step, SHIFT), value_of(low + 2 * step, SHIFT), value_of(low + 3 * step, SHIFT)
        n1, n2, n3, m1, m2, m3, _ = tally(values, 0, size, size, t1, t2, t3, k == 0, top, scale, BLOCK, STAGES)
        good1 = tl.where(k > 0, n1 + more >= k, m1 + more_weight >= need)
        good2 = tl.where(k > 0, n2 + more >= k, m2 + more_weight >= need)
        good3 = tl.where(k > 0, n3 + more >= k, m3 + more_weight >= need)
        low += (good1.to(tl.int64) + good2.to(tl.int64) + good3.to(tl.int64)) * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def last_kept(
    values, size, low, high, k, top_p, total, more, more_weight, top, scale,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the last of values[:size] that top_k and top_p keep.

    Args:
        low, high: The result's key is at least low and below high.
        k: 0 if top_k is off.
        total: The weight of all tokens; 0 if they are all in `values`.
        more, more_weight: The number and weight of tokens above `values`; 0 with both filters.
    """
    if k > 0:
        low = _narrow(values, size, low, high, k, 0, more, more_weight, top, scale, SHIFT, BLOCK, STAGES)
        high = key_of(top, SHIFT) + 1
    if top_p <= 1:
        if total == 0:
            t = value_of(low, SHIFT)
            n, _, _, m, _, _, everything = tally(values, 0, size, size, t, t, t, True, top, scale, BLOCK, STAGES)
            # Among logits equal to the k-th, count only as many as are needed for k tokens.
            total = tl.where(k > 0, m - (n - k) * weight_of(t, top, scale), everything)
        need = share_of(top_p, total)
        low = _narrow(values, size, low, high, 0, need, 0, more_weight, top, scale, SHIFT, BLOCK, STAGES)
    return value_of(low, SHIFT)
