"""Computes the recurrence of all sequences that decode in one kernel, with or without drafts.

A program has one head of a sequence and keeps its state in registers. Without drafts a sequence has one token. With
drafts, the program first adds the accepted drafts of the step before, then goes from token to token. It writes the
state after the first token, which is certain, and what each draft adds (`DraftUpdates`). Heads of a group read the same
keys. One of them writes these to the drafts, at places that no program of the step reads.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.elementwise import only_if, silu, softplus
from aengine.kernels.launch import power_of_two
from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.recurrent.state import UNALIGNED, RecurrentState, StateBatch, decode_warps
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["decodes"], do_not_specialize_on_alignment=UNALIGNED)
def _decode_kernel(
    xbc_ptr,  # [tokens, CHANNELS]: after the convolution and SiLU
    z_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    dt_ptr,  # [tokens, VALUE_HEADS]
    out_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    recurrence_ptr,  # [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    keys_ptr,  # of `DraftUpdates`, like the next two; only with drafts
    corrections_ptr,
    decays_ptr,
    a_log_ptr,  # [VALUE_HEADS]
    dt_bias_ptr,  # [VALUE_HEADS]
    skip_ptr,  # [VALUE_HEADS]
    slots_ptr,  # of decodes, then of chunks, like read, save_after and save_slots
    sources_ptr,  # only without drafts, like saves
    starts_ptr,  # only with drafts, like read, save_after and save_slots
    positions_ptr,
    saves_ptr,
    read_ptr,
    save_after_ptr,
    save_slots_ptr,
    decodes,
    z_stride,
    dt_stride,
    recurrence_stride,
    keys_stride,
    corrections_stride,
    decays_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ENTRIES: tl.constexpr,  # of `DraftUpdates`; 0: no step verifies drafts
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * KEYS
    sequence = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    group = head // REPEATS
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = k < KEY_DIM
    in_v = v < VALUE_DIM
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = sequence
    count = 1
    read = 0
    if ENTRIES:
        read = tl.load(read_ptr + sequence).to(tl.int32)
        if sequence >= decodes:
            first = tl.load(starts_ptr + sequence - decodes)
            count = tl.load(starts_ptr + sequence - decodes + 1) - first
    out = out_ptr + first.to(tl.int64) * VALUES + head * VALUE_DIM + v
    if (slot <= 0) | (read < 0) | (count <= 0):
        padding = tl.where((slot == 0) & ((sequence < decodes) | (read >= 0)), count, 0)
        for token in range(padding):
            tl.store(out + token * VALUES, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=in_v)
        return
    length = tl.load(positions_ptr + first).to(tl.int32)
    source = slot
    if not ENTRIES:
        source = tl.load(sources_ptr + sequence).to(tl.int64)
    matrix = head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    within = in_k[:, None] & in_v[None, :]
    state = recurrence_ptr + slot * recurrence_stride + matrix
    old = tl.load(recurrence_ptr + source * recurrence_stride + matrix, mask=only_if(source > 0, within), other=0.0)
    s = old.to(tl.float32)
    a = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    if ENTRIES:
        save_after = tl.load(save_after_ptr + sequence).to(tl.int32)
        save = tl.load(save_slots_ptr + sequence).to(tl.int64)
        keys_at = keys_ptr + slot * keys_stride + group * KEY_DIM + k
        corrections_at = corrections_ptr + slot * corrections_stride + head * VALUE_DIM + v
        decays_at = decays_ptr + slot * decays_stride + head
        writes_k = only_if(head % REPEATS == 0, in_k)  # one of the heads of a group
        for position in range(read, length):  # accepted drafts
            entry = position % ENTRIES
            key = tl.load(keys_at + entry * KEYS, mask=in_k, other=0.0)
            correction = tl.load(corrections_at + entry * VALUES, mask=in_v, other=0.0)
            s = s * tl.exp(tl.load(decays_at + entry * VALUE_HEADS)) + key[:, None] * correction[None, :]
            if (save > 0) & (save_after == position + 1):
                tl.store(recurrence_ptr + save * recurrence_stride + matrix, s.to(old.dtype), mask=within)
    else:
        save_after = length + 1
        save = tl.load(saves_ptr + sequence).to(tl.int64)
    for position in range(length, length + count):
        token = (first + position - length).to(tl.int64)
        xbc = xbc_ptr + token * CHANNELS
        x = tl.load(xbc + head * VALUE_DIM + v, mask=in_v, other=0.0).to(tl.float32)
        key = tl.load(xbc + VALUES + group * KEY_DIM + k, mask=in_k, other=0.0).to(tl.float32)
        query = tl.load(xbc + VALUES + KEYS + group * KEY_DIM + k, mask=in_k, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + token * z_stride + head * VALUE_DIM + v, mask=in_v, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + dt_bias)
        decay = a * step
        correction = step * x
        s = s * tl.exp(decay) + key[:, None] * correction[None, :]
        o = (tl.sum(s * query[:, None], axis=0) + skip * x) * silu(z)
        tl.store(out + (position - length) * VALUES, o.to(out_ptr.dtype.element_ty), mask=in_v)
        if (save > 0) & (save_after == position + 1):
            tl.store(recurrence_ptr + save * recurrence_stride + matrix, s.to(old.dtype), mask=within)
        if position == length:
            tl.store(state, s.to(old.dtype), mask=within)
        elif ENTRIES:
            entry = position % ENTRIES
            tl.store(keys_at + entry * KEYS, key, mask=writes_k)
            tl.store(corrections_at + entry * VALUES, correction, mask=in_v)
            tl.store(decays_at + entry * VALUE_HEADS, decay)


def decode(
    out: Tensor, xbc: Tensor, z: Tensor, dt: Tensor, state: RecurrentState, weights: MambaWeights, batch: StateBatch
) -> None:
    """Write the results of the sequences that decode to out [tokens, values], and update their states.

    xbc: after the convolution and SiLU, contiguous. Other arguments as in `Mamba`.
    """
    heads, drafted, updates = weights.heads, batch.drafted, state.drafts
    if drafted is not None and updates is None:
        raise ValueError("the states have no memory for drafts")
    if drafted is None or updates is None:
        programs, entries = batch.num_decodes * heads.value_heads, 0
        kept, strides = (state.recurrence,) * 3, (0, 0, 0)
        sequences = (batch.slots,) * 3
    else:
        programs, entries = len(batch.slots) * heads.value_heads, updates.entries
        kept = updates.keys, updates.corrections, updates.decays
        strides = updates.keys.stride(0), updates.corrections.stride(0), updates.decays.stride(0)
        sequences = drafted.read, drafted.save_after, drafted.save_slots
    _decode_kernel[(programs,)](
        xbc, z, dt, out, state.recurrence, *kept, weights.a_log, weights.dt_bias, weights.skip,
        batch.slots, batch.sources, batch.starts, batch.positions, batch.saves, *sequences, batch.num_decodes,
        z.stride(0), dt.stride(0), state.recurrence.stride(0), *strides,
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        ENTRIES=entries, BLOCK_K=power_of_two(heads.key_dim), BLOCK_V=power_of_two(heads.value_dim),
        num_warps=decode_warps(heads),
    )  # fmt: skip
