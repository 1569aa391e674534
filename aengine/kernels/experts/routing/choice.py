"""The choice of experts on the device, at the end of kernels that have the logits. `route_reference` is its
reference.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.experts.routing.router import TINY

_TINY = tl.constexpr(TINY)
_NONE = tl.constexpr(-(2**31))  # less than every key


@triton.jit
def choose(
    logits,  # [M, EXPERTS]
    correction_ptr,
    slots_ptr,
    ids_ptr,
    weights_ptr,
    t,  # [M]
    tokens,
    first_slot,
    scale,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    CORRECTION: tl.constexpr,
    PADDED: tl.constexpr,
    JITTER: tl.constexpr,
):
    """Choose for many tokens: find the best of each, TOP_K times."""
    WIDTH: tl.constexpr = triton.next_power_of_2(TOP_K)
    e = tl.arange(0, EXPERTS)[None, :]
    scores = _scores(logits, e, E, SCORING)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    # NaN counts as the least score, in its weight as well.
    keys = _ordered(tl.where(choice == choice, choice, float("-inf")))
    keys = tl.where(e < E, keys, _NONE)
    if GROUPS > 1:
        keys = _best_groups_only(keys, e, E, EXPERTS, M, GROUPS, CHOSEN_GROUPS, BEST_TWO)
    j = tl.arange(0, WIDTH)[None, :]
    ids = tl.zeros([M, WIDTH], tl.int32)
    chosen = tl.zeros([M, WIDTH], tl.int32)
    for turn in tl.static_range(TOP_K):
        best, first = _first_best(keys, e, EXPERTS)
        if CORRECTION:  # it is no part of the weight
            best = tl.max(tl.where(e == first, _ordered(scores), _NONE), axis=1)[:, None]
        if SCORING == "sparsemixer":
            best = _ordered(_share_of_close(_unordered(best), logits, keys, JITTER))
        ids = tl.where(j == turn, first, ids)
        chosen = tl.where(j == turn, best, chosen)
        keys = tl.where(e == first, _NONE, keys)
    weights = _weights(_unordered(chosen), j < TOP_K, SCORING, RENORMALISE)
    place = t[:, None] * TOP_K + j
    inside = (t < tokens)[:, None] & (j < TOP_K)
    if PADDED:
        ids = tl.where((tl.load(slots_ptr + t, mask=t < tokens, other=0) < first_slot)[:, None], -1, ids)
    tl.store(ids_ptr + place, ids, mask=inside)
    tl.store(weights_ptr + place, weights * scale, mask=inside)


@triton.jit
def choose_one(
    logits,  # [EXPERTS]
    correction_ptr,
    nowhere,  # whether the token is padding
    ids_ptr,  # [TOP_K], of this token
    weights_ptr,  # [TOP_K]
    scale,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CORRECTION: tl.constexpr,
):
    """Choose for one token: rank every expert by comparing it with every other, all at once."""
    e = tl.arange(0, EXPERTS)
    scores = _scores(logits, e, E, SCORING)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    # NaN has the lowest rank.
    choice = tl.where((e < E) & (choice == choice), choice, float("-inf"))
    rank = tl.sum((choice[:, None] > choice[None, :]).to(tl.int32), axis=0)  # [EXPERTS]
    # Equal scores have equal ranks; the sum of the ranks shows it. That is rare, and comparing ids as well takes twice
    # as long.
    if tl.sum(tl.where(e < E, rank, 0)) != E * (E - 1) // 2:
        order = _ordered(choice)  # so that the compiler does not keep the comparisons above for these
        earlier = (order[:, None] == order[None, :]) & (e[:, None] < e[None, :])
        before = (order[:, None] > order[None, :]) | earlier
        rank = tl.sum(before.to(tl.int32), axis=0)
    chosen = (rank < TOP_K) & (e < E)
    weights = _weights(scores, chosen, SCORING, RENORMALISE)
    tl.store(ids_ptr + rank, tl.where(nowhere, -1, e), mask=chosen)
    tl.store(weights_ptr + rank, weights * scale, mask=chosen)


@triton.jit
def _share_of_close(best, logits, keys, JITTER: tl.constexpr):
    """Return the softmax of the best logits [M, 1] among logits [M, EXPERTS] that are close and not chosen yet."""
    far = (best - logits) / tl.maximum(tl.abs(logits), best) > 2 * JITTER
    shares = tl.where(far | (keys == _NONE), 0.0, tl.exp(logits - best))
    return 1.0 / tl.sum(shares, axis=1)[:, None]


@triton.jit
def _ordered(values):
    """Map float32 to int32 in the same order, 0.0 and -0.0 to one value.

    A warp finds the greatest integer in one instruction, and the greatest float with its place in ten.
    """
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(keys):
    """Invert `_ordered`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_best(keys, places, WIDTH: tl.constexpr):
    """Return the greatest of each row of keys [M, WIDTH], and the lowest of `places` [1, WIDTH] that has it, both [M,
    1].
    """
    best = tl.max(keys, axis=1)[:, None]
    return best, tl.min(tl.where(keys == best, places, WIDTH), axis=1)[:, None]


@triton.jit
def _scores(logits, e, E: tl.constexpr, SCORING: tl.constexpr):
    """Return the scores [..., EXPERTS] of experts e."""
    if SCORING == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        last: tl.constexpr = len(logits.shape) - 1
        scores = tl.where(e < E, logits, float("-inf"))
        if SCORING == "softmax":
            scores = tl.exp(scores - tl.max(scores, axis=last, keep_dims=True))
            scores /= tl.sum(scores, axis=last, keep_dims=True)
    return scores


@triton.jit
def _weights(scores, chosen, SCORING: tl.constexpr, RENORMALISE: tl.constexpr):
    """Return the weights of a token's chosen experts; the others are 0."""
    last: tl.constexpr = len(scores.shape) - 1
    weights = tl.where(chosen, scores, 0.0)
    if SCORING == "softmax_of_chosen":
        highest = tl.max(tl.where(chosen, scores, float("-inf")), axis=last, keep_dims=True)
        weights = tl.where(chosen, tl.exp(scores - highest), 0.0)
        weights /= tl.sum(weights, axis=last, keep_dims=True)
    if SCORING == "sigmoid_of_chosen":
        weights = tl.where(chosen, tl.sigmoid(scores), 0.0)
    if RENORMALISE:
        weights /= tl.sum(weights, axis=last, keep_dims=True) + _TINY
    return weights


@triton.jit
def _best_groups_only(
    keys,
    e,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    M: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
):
    """Set keys [M, EXPERTS] to _NONE for the experts of all but the best groups."""
    WIDTH: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = e // (E // GROUPS)  # [1, EXPERTS]
    g = tl.arange(0, WIDTH)[None, :]
    scores = tl.full([M, WIDTH], _NONE, tl.int32)
    for index in range(GROUPS):
        own = tl.where(group == index, keys, _NONE)
        best, first = _first_best(own, e, EXPERTS)
        if BEST_TWO:
            second = tl.max(tl.where(e == first, _NONE, own), axis=1)[:, None]
            best = _ordered(_unordered(best) + _unordered(second))
        scores = tl.where(g == index, best, scores)
    kept = keys < _NONE  # all False
    for _ in range(CHOSEN_GROUPS):
        _best, first = _first_best(scores, g, WIDTH)
        kept = kept | (group == first)
        scores = tl.where(g == first, _NONE, scores)
    return tl.where(kept, keys, _NONE)
