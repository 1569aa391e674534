"""The choice of experts on the device: `route_reference`, as the ends of kernels that have the logits."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.experts.routing.router import TINY

_TINY = tl.constexpr(TINY)


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
):
    """For many tokens: the best of each, TOP_K times."""
    WIDTH: tl.constexpr = triton.next_power_of_2(TOP_K)
    e = tl.arange(0, EXPERTS)[None, :]
    lowest = float("-inf")
    scores = _scores(logits, e, E, SCORING)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    choice = tl.where(e < E, choice, lowest)
    if GROUPS > 1:
        choice = _best_groups_only(choice, e, E, M, GROUPS, CHOSEN_GROUPS, BEST_TWO)
    j = tl.arange(0, WIDTH)[None, :]
    ids = tl.zeros([M, WIDTH], tl.int32)
    weights = tl.zeros([M, WIDTH], tl.float32)
    for turn in range(TOP_K):
        best = tl.argmax(choice, axis=1)[:, None]  # the lowest id among equals
        weight = tl.sum(tl.where(e == best, scores, 0.0), axis=1)[:, None]
        ids = tl.where(j == turn, best, ids)
        weights = tl.where(j == turn, weight, weights)
        choice = tl.where(e == best, lowest, choice)
    weights = _weights(weights, j < TOP_K, SCORING, RENORMALISE)
    place = t[:, None] * TOP_K + j
    inside = (t < tokens)[:, None] & (j < TOP_K)
    # Logits that are not numbers must not lead outside of the experts.
    ids = tl.minimum(ids, E - 1)
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
    """For one token: every expert's rank by comparison with every other, at once instead of one turn after another."""
    e = tl.arange(0, EXPERTS)
    scores = _scores(logits, e, E, SCORING)
    choice = scores
    if CORRECTION:
        choice += tl.load(correction_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    # What is no number has a rank as well: the lowest.
    choice = tl.where((e < E) & (choice == choice), choice, float("-inf"))
    rank = tl.sum((choice[:, None] > choice[None, :]).to(tl.int32), axis=0)  # [EXPERTS]
    # Equals have the same rank, which their sum tells; it is rare, and comparing ids as well takes twice as long.
    if tl.sum(tl.where(e < E, rank, 0)) != E * (E - 1) // 2:
        # As integers of the same order, so that the compiler does not keep the comparisons above for these.
        bits = (choice + 0.0).to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        earlier = (order[:, None] == order[None, :]) & (e[:, None] < e[None, :])
        before = (order[:, None] > order[None, :]) | earlier
        rank = tl.sum(before.to(tl.int32), axis=0)
    chosen = rank < TOP_K
    weights = _weights(scores, chosen, SCORING, RENORMALISE)
    tl.store(ids_ptr + rank, tl.where(nowhere, -1, e), mask=chosen)
    tl.store(weights_ptr + rank, weights * scale, mask=chosen)


@triton.jit
def _scores(logits, e, E: tl.constexpr, SCORING: tl.constexpr):
    """[..., EXPERTS], of experts e."""
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
    """Of a token's scores those that were chosen, as weights; the others become 0."""
    last: tl.constexpr = len(scores.shape) - 1
    weights = tl.where(chosen, scores, 0.0)
    if SCORING == "softmax_of_chosen":
        highest = tl.max(tl.where(chosen, scores, float("-inf")), axis=last, keep_dims=True)
        weights = tl.where(chosen, tl.exp(scores - highest), 0.0)
        weights /= tl.sum(weights, axis=last, keep_dims=True)
    if RENORMALISE:
        weights /= tl.sum(weights, axis=last, keep_dims=True) + _TINY
    return weights


@triton.jit
def _best_groups_only(
    choice,
    e,
    E: tl.constexpr,
    M: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
):
    """choice [M, EXPERTS]: -inf for the experts of the other groups."""
    WIDTH: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = e // (E // GROUPS)  # [1, EXPERTS]
    lowest = float("-inf")
    g = tl.arange(0, WIDTH)[None, :]
    scores = tl.full([M, WIDTH], lowest, tl.float32)
    for index in range(GROUPS):
        own = tl.where(group == index, choice, lowest)
        best = tl.max(own, axis=1)
        if BEST_TWO:
            best += tl.max(tl.where(e == tl.argmax(own, axis=1)[:, None], lowest, own), axis=1)
        scores = tl.where(g == index, best[:, None], scores)
    kept = choice < lowest  # none
    for _ in range(CHOSEN_GROUPS):
        best = tl.argmax(scores, axis=1)[:, None]
        kept = kept | (group == best)
        scores = tl.where(g == best, lowest, scores)
    return tl.where(kept, choice, lowest)
