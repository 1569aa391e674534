"""Log-probabilities of drawn tokens and of the k likeliest, in one pass over the vocabulary, without a sort.

1. groups   reads the row in pieces, one for each program. It finds the highest logit of every `GROUP` neighbours, and
            sums the piece's exponentials.
2. pick     has one program for each row. It finds the k groups with the highest logits, and picks their best token k
            times.

The k best groups contain the k likeliest tokens: any other token is less likely than the best token of each. Among
equals the lower id comes first, for groups and for tokens. So which of several equal tokens are returned depends
neither on k nor on other rows. The pieces do not depend on the number of rows, so the sums do not either.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.draw.cutoff_search import key_of, value_of
from aengine.kernels.launch import power_of_two
from aengine.kernels.variants import keep_variants
from aengine.requests.sampling_params import MAX_LOGPROBS

GROUP = 64  # tokens
GROUPS = 64  # groups of a piece

_ALL_BITS = tl.constexpr(0x7FFFFFFF)  # the bits of an id
_NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _ranked(x, ids):
    """Return int64 with the order of the floats; among equals the lower id is larger."""
    return (key_of(x, 0) << 32) + (ids ^ _ALL_BITS)


@triton.jit
def _id_of(ranked):
    return (ranked & _ALL_BITS) ^ _ALL_BITS


@keep_variants
@triton.jit
def _groups_kernel(
    logits_ptr,  # [all draws, VOCAB]
    draws_ptr,  # [n] int64
    highest_ptr,  # [n, PIECES * GROUPS] float32: the highest logit of each group
    peak_ptr,  # [n, PIECES] float32: the highest logit of a piece
    sum_ptr,  # [n, PIECES] float32: the sum of exp(logit - peak)
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    place, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    draw = tl.load(draws_ptr + place)
    groups = piece * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + draw * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    highest = tl.max(x, axis=1)
    peak = tl.max(highest, axis=0)
    weights = tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0))
    tl.store(highest_ptr + place * (PIECES * GROUPS) + groups, highest)
    tl.store(peak_ptr + tl.program_id(0), peak)
    tl.store(sum_ptr + tl.program_id(0), tl.sum(tl.sum(weights, axis=1), axis=0))


@keep_variants
@triton.jit(do_not_specialize=["k"])
def _pick_kernel(
    logits_ptr,
    draws_ptr,
    highest_ptr,
    peak_ptr,
    sum_ptr,
    token_ids_ptr,  # [all draws] int64
    sampled_ptr,  # [all draws] float32
    top_ids_ptr,  # [all draws, k] int64
    top_ptr,  # [all draws, k] float32
    k,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_SLOTS: tl.constexpr,  # powers of two
    GROUP_SLOTS: tl.constexpr,
    K_SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    place = tl.program_id(0)
    draw = tl.load(draws_ptr + place)
    logits = logits_ptr + draw * VOCAB

    pieces = tl.arange(0, PIECE_SLOTS)
    peaks = tl.load(peak_ptr + place * PIECES + pieces, mask=pieces < PIECES, other=float("-inf"))
    sums = tl.load(sum_ptr + place * PIECES + pieces, mask=pieces < PIECES, other=0.0)
    peak = tl.max(peaks, axis=0)
    log_sum = tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0))
    drawn = tl.load(logits + tl.load(token_ids_ptr + draw)).to(tl.float32)
    tl.store(sampled_ptr + draw, drawn - peak - log_sum)

    groups = tl.arange(0, GROUP_SLOTS)
    used = groups < tl.cdiv(VOCAB, GROUP)
    highest = tl.load(highest_ptr + place * (PIECES * GROUPS) + groups, mask=used, other=0.0)
    ranked = tl.where(used, _ranked(highest, groups), _NOTHING)
    slots = tl.arange(0, K_SLOTS)
    best_groups = tl.full([K_SLOTS], -1, tl.int32)
    for slot in range(k):
        best = tl.max(ranked, axis=0)
        group = tl.where(best > _NOTHING, _id_of(best), -1).to(tl.int32)  # -1: there are no more
        best_groups = tl.where(slots == slot, group, best_groups)
        ranked = tl.where(ranked == best, _NOTHING, ranked)

    ids = best_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    used = (best_groups[:, None] >= 0) & (ids < VOCAB)
    x = tl.load(logits + ids, mask=used, other=0.0).to(tl.float32)
    ranked = tl.where(used, _ranked(x, ids), _NOTHING)
    for slot in range(k):
        best = tl.max(tl.max(ranked, axis=1), axis=0)
        tl.store(top_ids_ptr + draw * k + slot, _id_of(best))
        tl.store(top_ptr + draw * k + slot, value_of(best >> 32, 0) - peak - log_sum)
        ranked = tl.where(ranked == best, _NOTHING, ranked)


def likeliest(logits: Tensor, draws: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the drawn tokens, and the ids and log-probabilities of the k likeliest.

    They are float32 [all draws], int64 and float32 [all draws, k], likeliest first, with zeros for draws not in
    `draws`.

    Args:
        logits: [all draws, vocab], contiguous; only read.
        draws: [n] int64.
        token_ids: [all draws] int64, in the vocabulary.

    Raises ValueError if k is above `MAX_LOGPROBS` or the vocabulary.
    """
    (count, vocab), n = logits.shape, len(draws)
    if not 0 <= k <= min(MAX_LOGPROBS, vocab):
        raise ValueError(f"k: {k} candidates; from 0 to {min(MAX_LOGPROBS, vocab)} can be picked")
    sampled = torch.zeros(count, dtype=torch.float32, device=logits.device)
    top_ids = torch.zeros((count, k), dtype=torch.int64, device=logits.device)
    top = torch.zeros((count, k), dtype=torch.float32, device=logits.device)
    if n == 0:
        return sampled, top_ids, top
    pieces = triton.cdiv(vocab, GROUP * GROUPS)
    highest = torch.empty((n, pieces * GROUPS), dtype=torch.float32, device=logits.device)
    peak = torch.empty((n, pieces), dtype=torch.float32, device=logits.device)
    total = torch.empty((n, pieces), dtype=torch.float32, device=logits.device)
    cut = {"VOCAB": vocab, "PIECES": pieces, "GROUPS": GROUPS, "GROUP": GROUP}
    _groups_kernel[(n * pieces,)](logits, draws, highest, peak, total, **cut, num_warps=4)
    group_slots = power_of_two(triton.cdiv(vocab, GROUP))
    _pick_kernel[(n,)](
        logits, draws, highest, peak, total, token_ids, sampled, top_ids, top, k,
        PIECE_SLOTS=power_of_two(pieces), GROUP_SLOTS=group_slots, K_SLOTS=power_of_two(MAX_LOGPROBS), **cut,
        num_warps=8 if group_slots <= 8192 else 16,  # at most 32 slots a thread, for up to half a million tokens
    )  # fmt: skip
    return sampled, top_ids, top
