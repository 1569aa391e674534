"""Computes the matrices of a block of tokens that do not depend on the state before the block.

Each token's correction depends on the earlier corrections of its block. This is a triangular system (I + L) w = ...,
in which L has the products of the tokens' keys. The inverse depends on no state, so one launch inverts the systems of
all blocks of all chunks. It substitutes within 16 tokens, then joins halves twice: [A 0; E B]^-1 = [A^-1 0;
-B^-1 E A^-1 B^-1].
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
from aengine.kernels.delta.convolve import keep_inputs
from aengine.kernels.elementwise import log_decay
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.recurrent.blocks import Blocks
from aengine.kernels.recurrent.state import BLOCK, UNALIGNED, RecurrentState, StateBatch
from aengine.kernels.variants import keep_variants


@dataclass(frozen=True, slots=True)
class Within:
    """Matrices and gates of each block, for each value head."""

    solved: Tensor  # [blocks, value_heads, BLOCK, BLOCK]: the inverse of the system
    seen: Tensor  # [blocks, value_heads, BLOCK, BLOCK]: how much each token reads of earlier tokens' corrections
    fade: Tensor  # [blocks, value_heads, BLOCK] float32: sums of g from the block's start
    beta: Tensor  # [blocks, value_heads, BLOCK] float32


@triton.jit
def _joined(system, inverse, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverses of diagonal blocks of 2 * HALF rows, given the inverses for HALF rows."""
    i = tl.arange(0, system.shape[0])
    pair = i // (2 * HALF)
    below = (pair[:, None] == pair[None, :]) & (i[:, None] // HALF > i[None, :] // HALF)
    found = tl.dot(tl.where(below, system, 0.0), inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, found, input_precision=PRECISION)


@triton.jit
def _inverse(system, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + system)^-1, float32, of a strictly lower triangular system [BLOCK, BLOCK]; BLOCK is 64."""
    SMALL: tl.constexpr = 16
    COUNT: tl.constexpr = BLOCK // SMALL
    i = tl.arange(0, BLOCK)
    # Invert the diagonal blocks of SMALL rows by substitution, all at once.
    this = tl.arange(0, COUNT)
    diagonal = this[:, None, None, None] == this[None, None, :, None]
    square = tl.reshape(system, [COUNT, SMALL, COUNT, SMALL])
    small = -tl.sum(tl.where(diagonal, square, 0.0), axis=2)  # [COUNT, SMALL, SMALL]
    r = tl.arange(0, SMALL)[None, :]
    for at in range(2, SMALL):
        here = r == at
        row = tl.sum(tl.where(here[:, :, None], small, 0.0), axis=1)  # [COUNT, SMALL]
        row += tl.sum(row[:, :, None] * small, axis=1)
        small = tl.where(here[:, :, None], row[:, None, :], small)
    spread = tl.where(diagonal, small[:, :, None, :] + tl.zeros(square.shape, tl.float32), 0.0)
    inverse = tl.reshape(spread, [BLOCK, BLOCK]) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse = _joined(system, inverse, SMALL, PRECISION)
    return _joined(system, inverse, 2 * SMALL, PRECISION)


@keep_variants
@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _within_kernel(
    x_ptr,  # [tokens, CHANNELS]: before the convolution
    qkv_ptr,  # [tokens, CHANNELS]: after it
    b_ptr,
    a_ptr,
    solved_ptr,
    seen_ptr,
    fade_ptr,
    beta_ptr,
    conv_ptr,  # [slots, WIDTH, CHANNELS]
    a_log_ptr,
    dt_bias_ptr,
    slots_ptr,  # of chunks, like sources_ptr
    sources_ptr,
    starts_ptr,
    positions_ptr,
    blocks_ptr,
    block_tokens_ptr,
    x_stride,
    b_stride,
    a_stride,
    conv_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    block = tl.program_id(1)
    chunk = tl.load(blocks_ptr + block)
    if chunk < 0:
        return
    slot = tl.load(slots_ptr + chunk).to(tl.int64)
    if slot <= 0:
        return
    start = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    first_token = tl.load(block_tokens_ptr + block)
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_K)
    token = first_token + i
    there = (token >= start) & (token < end)
    wide = token.to(tl.int64)
    within = there[:, None] & (d < KEY_DIM)[None, :]
    q_at = qkv_ptr + wide[:, None] * CHANNELS + head // REPEATS * KEY_DIM + d[None, :]
    k = tl.load(q_at + KEYS, mask=within, other=0.0)
    q = tl.load(q_at, mask=within, other=0.0)
    a = tl.load(a_ptr + wide * a_stride + head, mask=there, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + wide * b_stride + head, mask=there, other=0.0).to(tl.float32)
    g = log_decay(tl.load(a_log_ptr + head).to(tl.float32), a, tl.load(dt_bias_ptr + head).to(tl.float32))
    beta = tl.where(there, tl.sigmoid(b), 0.0)
    fade = tl.cumsum(tl.where(there, g, 0.0), axis=0)
    of_block = block.to(tl.int64) * VALUE_HEADS + head
    tl.store(fade_ptr + of_block * BLOCK + i, fade)
    tl.store(beta_ptr + of_block * BLOCK + i, beta)
    # The decay of each token's correction until another token reads it; zero for later corrections.
    earlier = i[:, None] >= i[None, :]
    left = tl.exp(tl.where(earlier, fade[:, None] - fade[None, :], float("-inf")))
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * left
    matrix = of_block * (BLOCK * BLOCK) + i[:, None] * BLOCK + i[None, :]
    tl.store(seen_ptr + matrix, seen.to(seen_ptr.dtype.element_ty))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * left * beta[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    solved = _inverse(system, BLOCK, PRECISION)
    tl.store(solved_ptr + matrix, solved.to(solved_ptr.dtype.element_ty))

    if first_token + BLOCK >= end:  # the slot keeps the chunk's last inputs for the next step's convolution
        source = tl.load(sources_ptr + chunk).to(tl.int64)
        last = end - 1
        position = tl.load(positions_ptr + last).to(tl.int32)
        to = conv_ptr + slot * conv_stride
        ring = conv_ptr + source * conv_stride
        v = tl.arange(0, BLOCK_V)
        v_channels = 2 * KEYS + head * VALUE_DIM + v
        copies = slot != source
        keep_inputs(
            to, ring, x_ptr, x_stride, v_channels, v < VALUE_DIM, source > 0, copies, last, position, start,
            CHANNELS, WIDTH,
        )  # fmt: skip
        if head % REPEATS == 0:
            for keys in tl.static_range(2):
                channels = keys * KEYS + head // REPEATS * KEY_DIM + d
                keep_inputs(
                    to, ring, x_ptr, x_stride, channels, d < KEY_DIM, source > 0, copies, last, position, start,
                    CHANNELS, WIDTH,
                )  # fmt: skip


def solve_within(
    x: Tensor,
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    state: RecurrentState,
    weights: DeltaWeights,
    batch: StateBatch,
    blocks: Blocks,
) -> Within:
    """Return the matrices and gates of all blocks, and write the chunks' last inputs to their slots.

    x: the convolution's input. qkv: its output.
    """
    heads, first = weights.heads, batch.num_decodes
    overlap, exact = launch_for(x.device).overlap, x.dtype == torch.float32
    squares = (blocks.most, heads.value_heads, BLOCK, BLOCK)
    solved, seen = (torch.empty(squares, dtype=x.dtype, device=x.device) for _ in range(2))
    fade, beta = (torch.empty(squares[:3], dtype=torch.float32, device=x.device) for _ in range(2))
    _within_kernel[(heads.value_heads, blocks.most)](
        x, qkv, b, a, solved, seen, fade, beta, state.conv, weights.a_log, weights.dt_bias,
        batch.slots[first:], batch.sources[first:], batch.starts, batch.positions, blocks.chunks, blocks.tokens,
        x.stride(0), b.stride(0), a.stride(0), state.conv.stride(0),
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        WIDTH=weights.conv.shape[1], BLOCK=BLOCK, BLOCK_K=power_of_two(heads.key_dim),
        BLOCK_V=power_of_two(heads.value_dim), PRECISION="ieee" if exact else "tf32", OVERLAP=overlap, num_warps=4,
        maxnreg=128, launch_pdl=overlap,
    )  # fmt: skip
    return Within(solved, seen, fade, beta)
