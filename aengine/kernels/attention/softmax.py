"""Softmax over keys that come block by block, and over parts of them."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_down(scores, scale, best, totals):
    """One block of keys, its rows, into a running softmax in base 2; queries that have seen nothing stay at -inf and 0.

    scores [keys, queries] are to be multiplied with scale [queries], best [queries] has been; totals [keys, queries]
    add up to the whole, so that a step adds nothing up. Returns the new best and totals, what the values so far are
    to be multiplied with, and the block's weights.
    """
    new_best = tl.maximum(best, tl.max(scores, axis=0) * scale)
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.math.exp2(best - safe)
    weights = tl.math.exp2(scores * scale[None, :] - safe[None, :])
    return new_best, totals * shrink[None, :] + weights, shrink, weights


@triton.jit
def with_sink(best, total, sinks_ptr, GROUP: tl.constexpr):
    """The total [heads] of a softmax in base 2, and one more score of each head, which has no value."""
    group = tl.arange(0, total.shape[0])
    sink = tl.load(sinks_ptr + group, mask=group < GROUP, other=0.0) * 1.4426950408889634
    return total + tl.math.exp2(sink - best)


@triton.jit
def softmax_step(scores, best, total, acc):
    """One block into a running softmax in base 2, its keys side by side, with the values so far.

    Rows that have seen nothing stay at -inf and 0. Returns the new best, total and values, and the block's weights.
    """
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.math.exp2(best - safe)
    weights = tl.math.exp2(scores - safe[:, None])
    return new_best, total * shrink + tl.sum(weights, axis=1), acc * shrink[:, None], weights


@triton.jit
def merge_parts(best, total, acc, part_best, part_total, values):
    """Add parts [parts, MERGE_GROUP(, DIM)] of a softmax to what there is of it."""
    new_best = tl.maximum(best, tl.max(part_best, axis=0))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.math.exp2(best - safe)
    grow = tl.math.exp2(part_best - safe[None, :])
    total = total * shrink + tl.sum(part_total * grow, axis=0)
    return new_best, total, acc * shrink[:, None] + tl.sum(values * grow[:, :, None], axis=0)
