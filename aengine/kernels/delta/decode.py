"""Computes one token of each sequence in one kernel: convolution, gates, recurrence, gated norm.

A program has one value head of a row and keeps its state in registers. It reads and writes the state once. It computes
S^T k and S^T q in one pass before the correction. The correction then adds (q . k) times itself to the result.

No other kernel of the step writes the states, so they are loaded before the wait. A ring keeps the last inputs of the
convolution. A token writes one row of the ring and reads the others, so the value heads of one key head do not
interfere.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.elementwise import gated_norm, log_decay, only_if, silu
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.recurrent.state import UNALIGNED, RecurrentState, StateBatch
from aengine.kernels.variants import keep_variants


@triton.jit
def _past(ring_ptr, weight_ptr, channels, inside, position, known, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sum that earlier tokens add to the convolution."""
    total = tl.zeros(channels.shape, tl.float32)
    for back in tl.static_range(1, WIDTH):
        there = only_if(known & (position >= back), inside)
        x = tl.load(ring_ptr + (position + WIDTH - back) % WIDTH * CHANNELS + channels, mask=there, other=0.0)
        weight = tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    return total


@triton.jit
def _filtered(past, weight_ptr, x_ptr, channels, inside, WIDTH: tl.constexpr):
    """Add the current token's input to the convolution, and apply SiLU; float32."""
    x = tl.load(x_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1), mask=inside, other=0.0).to(tl.float32)
    return silu(past + x * weight)


@triton.jit
def _keep(
    to_ptr, ring_ptr, x_ptr, channels, inside, position, known, whole,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write this token's row of a ring. whole: also copy the earlier rows from another ring."""
    if whole:
        for back in tl.static_range(1, WIDTH):
            row = (position + WIDTH - back) % WIDTH * CHANNELS
            there = only_if(known & (position >= back), inside)
            tl.store(to_ptr + row + channels, tl.load(ring_ptr + row + channels, mask=there, other=0.0), mask=inside)
    tl.store(to_ptr + position % WIDTH * CHANNELS + channels, tl.load(x_ptr + channels, mask=inside), mask=inside)


@triton.jit
def sums_of_two(a, b, x, y):
    return a + x, b + y


@triton.jit
def sums_of_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def unit_vectors(query, key, KEY_DIM: tl.constexpr):
    """Return the query and the key with length 1, the query scaled, and their product."""
    keys, queries, match = tl.reduce((key * key, query * query, query * key), 0, sums_of_three)
    key *= tl.math.rsqrt(keys + 1e-6)
    q_scale = tl.math.rsqrt(queries + 1e-6) * (KEY_DIM**-0.5)
    query *= q_scale
    match *= q_scale * tl.math.rsqrt(keys + 1e-6)
    return query, key, match


@triton.jit
def add_token(s, query, key, value, b):
    """Add a token to a decayed state. Returns the state, the correction, and the query's result before it."""
    answer, asked = tl.reduce((s * key[:, None], s * query[:, None]), 0, sums_of_two)
    correction = tl.sigmoid(b) * (value - answer)
    return s + key[:, None] * correction[None, :], correction, asked


@keep_variants
@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _decode_kernel(
    qkv_ptr,  # [tokens, CHANNELS]
    z_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    b_ptr,  # [tokens, VALUE_HEADS]
    a_ptr,  # [tokens, VALUE_HEADS]
    out_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    unit_ptr,  # [rows * VALUE_HEADS, 2, BLOCK_K] float32: scratch, THROUGH_MEMORY only
    conv_ptr,  # [slots, WIDTH, CHANNELS]
    recurrence_ptr,  # [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    weight_ptr,  # [CHANNELS, WIDTH]
    a_log_ptr,  # [VALUE_HEADS]
    dt_bias_ptr,  # [VALUE_HEADS]
    norm_ptr,  # [VALUE_DIM]
    slots_ptr,
    sources_ptr,
    positions_ptr,
    saves_ptr,
    qkv_stride,
    z_stride,
    b_stride,
    a_stride,
    conv_stride,
    recurrence_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    THROUGH_MEMORY: tl.constexpr,
    LATE: tl.constexpr,  # let the next kernel start after the loads of states, because it loads weights at once
    OVERLAP: tl.constexpr,
):
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    row = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    if OVERLAP and not LATE:
        gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = k < KEY_DIM
    in_v = v < VALUE_DIM
    slot = tl.load(slots_ptr + row).to(tl.int64)
    source = tl.load(sources_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int32)
    save = tl.load(saves_ptr + row).to(tl.int64)
    out = out_ptr + row.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + v
    if slot <= 0:
        if OVERLAP:
            gdc_wait()
        tl.store(out, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=only_if(slot == 0, in_v))
        return
    known = source > 0
    matrix = head * (KEY_DIM * VALUE_DIM) + k[:, None] * VALUE_DIM + v[None, :]
    within = in_k[:, None] & in_v[None, :]
    s = tl.load(recurrence_ptr + source * recurrence_stride + matrix, mask=only_if(known, within), other=0.0)
    ring = conv_ptr + source * conv_stride
    q_channels = head // REPEATS * KEY_DIM + k
    k_channels = KEYS + q_channels
    v_channels = 2 * KEYS + head * VALUE_DIM + v
    q_past = _past(ring, weight_ptr, q_channels, in_k, position, known, CHANNELS, WIDTH)
    k_past = _past(ring, weight_ptr, k_channels, in_k, position, known, CHANNELS, WIDTH)
    v_past = _past(ring, weight_ptr, v_channels, in_v, position, known, CHANNELS, WIDTH)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + v, mask=in_v, other=0.0)
    if OVERLAP:
        gdc_wait()
        if LATE:
            gdc_launch_dependents()
    qkv = qkv_ptr + row.to(tl.int64) * qkv_stride
    z = tl.load(z_ptr + row.to(tl.int64) * z_stride + head * VALUE_DIM + v, mask=in_v, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row.to(tl.int64) * b_stride + head).to(tl.float32)
    a = tl.load(a_ptr + row.to(tl.int64) * a_stride + head).to(tl.float32)

    query = _filtered(q_past, weight_ptr, qkv, q_channels, in_k, WIDTH)
    key = _filtered(k_past, weight_ptr, qkv, k_channels, in_k, WIDTH)
    value = _filtered(v_past, weight_ptr, qkv, v_channels, in_v, WIDTH)
    query, key, match = unit_vectors(query, key, KEY_DIM)
    if THROUGH_MEMORY:
        unit = unit_ptr + tl.program_id(0) * (2 * BLOCK_K) + k
        tl.store(unit, query)
        tl.store(unit + BLOCK_K, key)
        tl.debug_barrier()
        query = tl.load(unit)
        key = tl.load(unit + BLOCK_K)
    wide = s.to(tl.float32) * tl.exp(log_decay(a_log, a, dt_bias))
    wide, correction, asked = add_token(wide, query, key, value, b)
    kept = wide.to(s.dtype)
    tl.store(recurrence_ptr + slot * recurrence_stride + matrix, kept, mask=within)
    o = gated_norm(asked + match * correction, z, norm, eps, 0, VALUE_DIM)
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=in_v)

    first = only_if(head % REPEATS == 0, in_k)  # one of the value heads that read this key head
    moves = slot != source
    to = conv_ptr + slot * conv_stride
    _keep(to, ring, qkv, q_channels, first, position, known, moves, CHANNELS, WIDTH)
    _keep(to, ring, qkv, k_channels, first, position, known, moves, CHANNELS, WIDTH)
    _keep(to, ring, qkv, v_channels, in_v, position, known, moves, CHANNELS, WIDTH)
    if save > 0:
        to = conv_ptr + save * conv_stride
        _keep(to, ring, qkv, q_channels, first, position, known, True, CHANNELS, WIDTH)
        _keep(to, ring, qkv, k_channels, first, position, known, True, CHANNELS, WIDTH)
        _keep(to, ring, qkv, v_channels, in_v, position, known, True, CHANNELS, WIDTH)
        tl.store(recurrence_ptr + save * recurrence_stride + matrix, kept, mask=within)


@dataclass(frozen=True, slots=True)
class DeltaDecodeConfig:
    """How the kernel divides one shape."""

    warps: int
    # Whether q and k are exchanged between threads through memory. They always are if there are more threads than
    # elements, because otherwise several threads would compute the same element.
    through_memory: bool = False


def delta_decode(
    out: Tensor,
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    state: RecurrentState,
    weights: DeltaWeights,
    batch: StateBatch,
    config: DeltaDecodeConfig,
) -> None:
    """Write the decodes' results to out [tokens, values], and update their states. Arguments as in `DeltaNet`."""
    heads = weights.heads
    overlap, programs = launch_for(qkv.device).overlap, batch.num_decodes * heads.value_heads
    block_k, block_v = power_of_two(heads.key_dim), power_of_two(heads.value_dim)
    through_memory = config.through_memory or config.warps * 32 > block_k
    unit = torch.empty((programs, 2, block_k) if through_memory else 1, dtype=torch.float32, device=qkv.device)
    _decode_kernel[(programs,)](
        qkv, z, b, a, out, unit, state.conv, state.recurrence,
        weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        batch.slots, batch.sources, batch.positions, batch.saves,
        qkv.stride(0), z.stride(0), b.stride(0), a.stride(0), state.conv.stride(0), state.recurrence.stride(0),
        weights.eps,
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        WIDTH=weights.conv.shape[1], BLOCK_K=block_k, BLOCK_V=block_v, THROUGH_MEMORY=through_memory,
        LATE=batch.num_decodes == 1, OVERLAP=overlap,
        num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip
