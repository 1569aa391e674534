"""Computes the sequences that decode in a step in which rows may have drafts, in one kernel.

A program has one value head of a sequence and keeps its state in registers. It adds the accepted drafts of the step
before to the state, then goes from token to token. It writes the state after the first token, which is certain, and
what each draft adds (`DraftUpdates`).

Programs of other value heads read the same q and k. One of them writes these to the ring and to the drafts, at places
that no program of the step reads: the ring's new rows replace inputs of at least `WIDTH` tokens before the first one,
and `DraftUpdates.entries` is large enough.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.delta.decode import add_token, unit_vectors
from aengine.kernels.elementwise import gated_norm, log_decay, only_if, silu
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.recurrent.state import UNALIGNED, DraftedBatch, DraftUpdates, RecurrentState, StateBatch
from aengine.kernels.variants import keep_variants


@triton.jit
def _input(
    ring_ptr, draft_ptr, x_ptr, x_stride, channels, inside, position, read, length,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Load the convolution's input at a position. Before `read` it is in the ring, before `length` in the drafts."""
    in_ring = only_if((position >= 0) & (position < read), inside)
    drafted = only_if((position >= read) & (position < length), inside)
    x = tl.load(ring_ptr + (position + WIDTH) % WIDTH * CHANNELS + channels, mask=in_ring, other=0.0)
    x += tl.load(draft_ptr + (position + ENTRIES) % ENTRIES * CHANNELS + channels, mask=drafted, other=0.0)
    own = only_if(position >= length, inside)
    return x + tl.load(x_ptr + (position - length).to(tl.int64) * x_stride + channels, mask=own, other=0.0)


@triton.jit
def _filtered(
    weight_ptr, ring_ptr, draft_ptr, x_ptr, x_stride, channels, inside, position, read, length,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Return SiLU of the convolution at a position; float32."""
    total = tl.zeros(channels.shape, tl.float32)
    for i in tl.static_range(WIDTH):
        back = (i + 1) % WIDTH  # the token's own input last
        x = _input(
            ring_ptr, draft_ptr, x_ptr, x_stride, channels, inside, position - back, read, length,
            CHANNELS, WIDTH, ENTRIES,
        )  # fmt: skip
        weight = tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    return silu(total)


@triton.jit
def _inputs_of(
    weight_ptr, ring_ptr, draft_ptr, x_ptr, x_stride, q_channels, k_channels, v_channels, in_k, in_v, position, read,
    length, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Return the filtered query, key and value at a position."""
    query = _filtered(
        weight_ptr, ring_ptr, draft_ptr, x_ptr, x_stride, q_channels, in_k, position, read, length,
        CHANNELS, WIDTH, ENTRIES,
    )  # fmt: skip
    key = _filtered(
        weight_ptr, ring_ptr, draft_ptr, x_ptr, x_stride, k_channels, in_k, position, read, length,
        CHANNELS, WIDTH, ENTRIES,
    )  # fmt: skip
    value = _filtered(
        weight_ptr, ring_ptr, draft_ptr, x_ptr, x_stride, v_channels, in_v, position, read, length,
        CHANNELS, WIDTH, ENTRIES,
    )  # fmt: skip
    return query, key, value


@triton.jit
def _write_ring(
    to_ptr, ring_ptr, draft_ptr, x_ptr, x_stride, channels, inside, position, begin, read, length,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write a ring's inputs up to a position, but only those from position `begin` on."""
    for back in tl.static_range(WIDTH):
        x = _input(
            ring_ptr, draft_ptr, x_ptr, x_stride, channels, inside, position - back, read, length,
            CHANNELS, WIDTH, ENTRIES,
        )  # fmt: skip
        row = (position + WIDTH - back) % WIDTH * CHANNELS
        tl.store(to_ptr + row + channels, x, mask=only_if(position - back >= begin, inside))


@keep_variants
@triton.jit(do_not_specialize=["decodes"], do_not_specialize_on_alignment=UNALIGNED)
def _drafts_kernel(
    qkv_ptr,  # [tokens, CHANNELS]
    z_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    b_ptr,  # [tokens, VALUE_HEADS]
    a_ptr,  # [tokens, VALUE_HEADS]
    out_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    conv_ptr,  # [slots, WIDTH, CHANNELS]
    recurrence_ptr,  # [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    inputs_ptr,  # of `DraftUpdates`, like the next three
    keys_ptr,
    corrections_ptr,
    decays_ptr,
    weight_ptr,  # [CHANNELS, WIDTH]
    a_log_ptr,  # [VALUE_HEADS]
    dt_bias_ptr,  # [VALUE_HEADS]
    norm_ptr,  # [VALUE_DIM]
    slots_ptr,  # of decodes, then of chunks, like read, save_after and save_slots
    starts_ptr,
    positions_ptr,
    read_ptr,
    save_after_ptr,
    save_slots_ptr,
    decodes,
    qkv_stride,
    z_stride,
    b_stride,
    a_stride,
    conv_stride,
    recurrence_stride,
    inputs_stride,
    keys_stride,
    corrections_stride,
    decays_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    sequence = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    key_head = head // REPEATS
    if OVERLAP:
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = k < KEY_DIM
    in_v = v < VALUE_DIM
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    read = tl.load(read_ptr + sequence).to(tl.int32)
    first = sequence
    count = 1
    if sequence >= decodes:
        first = tl.load(starts_ptr + sequence - decodes)
        count = tl.load(starts_ptr + sequence - decodes + 1) - first
    out = out_ptr + first.to(tl.int64) * VALUES + head * VALUE_DIM + v
    if (slot <= 0) | (read < 0) | (count <= 0):
        if OVERLAP:
            gdc_wait()
        padding = tl.where((slot == 0) & ((sequence < decodes) | (read >= 0)), count, 0)
        for token in range(padding):
            tl.store(out + token * VALUES, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=in_v)
        return
    length = tl.load(positions_ptr + first).to(tl.int32)
    save_after = tl.load(save_after_ptr + sequence).to(tl.int32)
    save = tl.load(save_slots_ptr + sequence).to(tl.int64)
    matrix = head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    within = in_k[:, None] & in_v[None, :]
    state = recurrence_ptr + slot * recurrence_stride + matrix
    saved_state = recurrence_ptr + save * recurrence_stride + matrix
    s = tl.load(state, mask=within, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + v, mask=in_v, other=0.0)
    ring = conv_ptr + slot * conv_stride
    drafts = inputs_ptr + slot * inputs_stride
    keys_at = keys_ptr + slot * keys_stride + key_head * KEY_DIM + k
    corrections_at = corrections_ptr + slot * corrections_stride + head * VALUE_DIM + v
    decays_at = decays_ptr + slot * decays_stride + head
    x = qkv_ptr + first.to(tl.int64) * qkv_stride
    q_channels = key_head * KEY_DIM + k
    k_channels = KEYS + q_channels
    v_channels = 2 * KEYS + head * VALUE_DIM + v
    writes_k = only_if(head % REPEATS == 0, in_k)  # one of the value heads that read this key head
    if OVERLAP:
        gdc_wait()

    for position in range(read, length):  # accepted drafts
        entry = position % ENTRIES
        key = tl.load(keys_at + entry * KEYS, mask=in_k, other=0.0)
        correction = tl.load(corrections_at + entry * VALUES, mask=in_v, other=0.0)
        s = s * tl.exp(tl.load(decays_at + entry * VALUE_HEADS)) + key[:, None] * correction[None, :]
        if (save > 0) & (save_after == position + 1):
            tl.store(saved_state, s.to(recurrence_ptr.dtype.element_ty), mask=within)
    # The inputs of the next token are loaded while this one's are added to the state.
    next_query, next_key, next_value = _inputs_of(
        weight_ptr, ring, drafts, x, qkv_stride, q_channels, k_channels, v_channels, in_k, in_v, length, read, length,
        CHANNELS, WIDTH, ENTRIES,
    )  # fmt: skip
    for position in range(length, length + count):
        query, key, value = next_query, next_key, next_value
        follows = position + 1 < length + count
        next_query, next_key, next_value = _inputs_of(
            weight_ptr, ring, drafts, x, qkv_stride, q_channels, k_channels, v_channels,
            only_if(follows, in_k), only_if(follows, in_v), position + 1, read, length, CHANNELS, WIDTH, ENTRIES,
        )  # fmt: skip
        query, key, match = unit_vectors(query, key, KEY_DIM)
        token = (first + position - length).to(tl.int64)
        z = tl.load(z_ptr + token * z_stride + head * VALUE_DIM + v, mask=in_v, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * b_stride + head).to(tl.float32)
        a = tl.load(a_ptr + token * a_stride + head).to(tl.float32)
        decay = log_decay(a_log, a, dt_bias)
        s *= tl.exp(decay)
        s, correction, asked = add_token(s, query, key, value, b)
        o = gated_norm(asked + match * correction, z, norm, eps, 0, VALUE_DIM)
        tl.store(out + (position - length) * VALUES, o.to(out_ptr.dtype.element_ty), mask=in_v)
        if (save > 0) & (save_after == position + 1):
            tl.store(saved_state, s.to(recurrence_ptr.dtype.element_ty), mask=within)
        if position == length:
            tl.store(state, s.to(recurrence_ptr.dtype.element_ty), mask=within)
        else:
            entry = position % ENTRIES
            tl.store(keys_at + entry * KEYS, key, mask=writes_k)
            tl.store(corrections_at + entry * VALUES, correction, mask=in_v)
            tl.store(decays_at + entry * VALUE_HEADS, decay)

    # The three parts of the inputs: to the snapshot, to the drafts, and last to the ring, from which they are read.
    for part in tl.static_range(3):
        if part < 2:
            channels = q_channels + part * KEYS
            writes = writes_k
        else:
            channels = v_channels
            writes = in_v
        if (save > 0) & (save_after > read) & (save_after <= length + count):
            _write_ring(
                conv_ptr + save * conv_stride, ring, drafts, x, qkv_stride, channels, writes, save_after - 1, 0,
                read, length, CHANNELS, WIDTH, ENTRIES,
            )  # fmt: skip
        for position in range(length + 1, length + count):
            own = tl.load(x + (position - length).to(tl.int64) * qkv_stride + channels, mask=writes, other=0.0)
            tl.store(drafts + position % ENTRIES * CHANNELS + channels, own, mask=writes)
        _write_ring(
            ring, ring, drafts, x, qkv_stride, channels, writes, length, read, read, length, CHANNELS, WIDTH, ENTRIES
        )


def decode_drafts(
    out: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    state: RecurrentState,
    updates: DraftUpdates,
    weights: DeltaWeights,
    batch: StateBatch,
    drafted: DraftedBatch,
    warps: int,
) -> None:
    """Write the results of all sequences that decode to out [tokens, values], and update their states.

    Other arguments as in `DeltaNet`.
    """
    heads = weights.heads
    overlap = launch_for(qkv.device).overlap
    _drafts_kernel[(len(batch.slots) * heads.value_heads,)](
        qkv, z, b, a, out, state.conv, state.recurrence,
        updates.inputs, updates.keys, updates.corrections, updates.decays,
        weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        batch.slots, batch.starts, batch.positions, drafted.read, drafted.save_after, drafted.save_slots,
        batch.num_decodes,
        qkv.stride(0), z.stride(0), b.stride(0), a.stride(0), state.conv.stride(0), state.recurrence.stride(0),
        updates.inputs.stride(0), updates.keys.stride(0), updates.corrections.stride(0), updates.decays.stride(0),
        weights.eps,
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        WIDTH=weights.conv.shape[1], ENTRIES=updates.entries,
        BLOCK_K=power_of_two(heads.key_dim), BLOCK_V=power_of_two(heads.value_dim), OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip
