"""Computes a convolution of width 4 over chunks and SiLU, and normalises q and k.

A program has some heads of q, k or v. It goes from token to token and keeps the inputs of the last three in registers,
so it reads each input once. It loads the next four tokens in advance. A slot holds the inputs of the tokens before a
chunk in a ring. A chunk may start and end in the same slot, so a later kernel writes the slot's ring.
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
from aengine.kernels.elementwise import only_if, silu
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.recurrent.blocks import Blocks
from aengine.kernels.recurrent.state import BLOCK, UNALIGNED, RecurrentState, StateBatch
from aengine.kernels.variants import keep_variants


@triton.jit
def keep_inputs(
    to_ptr, ring_ptr, x_ptr, x_stride, channels, inside, known, copies, token, position, start,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the ring after a token. copies: also copy inputs of tokens before the chunk from another ring."""
    for back in tl.static_range(WIDTH):
        row = (position + WIDTH - back) % WIDTH * CHANNELS + channels
        ours = token - back >= start
        x = tl.load(x_ptr + (token - back).to(tl.int64) * x_stride + channels, mask=only_if(ours, inside), other=0.0)
        if copies:
            theirs = known & (token - back < start) & (position >= back)
            x += tl.load(ring_ptr + row, mask=only_if(theirs, inside), other=0.0)
        tl.store(to_ptr + row, x, mask=only_if(ours | copies, inside))


@keep_variants
@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _convolve_kernel(
    x_ptr,  # [tokens, CHANNELS]
    out_ptr,  # [tokens, CHANNELS]
    conv_ptr,  # [slots, 4, CHANNELS]
    weight_ptr,  # [CHANNELS, 4]
    slots_ptr,  # of chunks, like sources_ptr
    sources_ptr,
    starts_ptr,
    positions_ptr,
    saves_ptr,
    blocks_ptr,
    block_tokens_ptr,
    x_stride,
    conv_stride,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program; a divisor of KEY_HEADS and of the number of value heads
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program; a divisor of BLOCK
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PIECES: tl.constexpr = BLOCK // TOKENS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0) // PIECES
    first_head = tl.program_id(1) * HEADS  # of q, of k, of v
    chunk = tl.load(blocks_ptr + block)
    if chunk < 0:
        return
    slot = tl.load(slots_ptr + chunk)
    if slot <= 0:
        return
    source = tl.load(sources_ptr + chunk).to(tl.int64)
    known = source > 0
    start = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    begin = tl.load(positions_ptr + start).to(tl.int32)  # the position of the chunk's first token
    first_token = tl.load(block_tokens_ptr + block) + tl.program_id(0) % PIECES * TOKENS
    stop = tl.minimum(first_token + TOKENS, end)
    first_token = tl.maximum(first_token, start)
    if first_token >= stop:
        return
    is_value = first_head >= 2 * KEY_HEADS
    dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
    first_channel = tl.where(
        is_value, 2 * KEY_HEADS * KEY_DIM + (first_head - 2 * KEY_HEADS) * VALUE_DIM, first_head * KEY_DIM
    )
    inner = tl.arange(0, BLOCK_D)[None, :]
    inside = inner + tl.zeros([HEADS, BLOCK_D], tl.int32) < dim
    channels = first_channel + tl.arange(0, HEADS)[:, None] * dim + inner
    ring = conv_ptr + source * conv_stride
    w0 = tl.load(weight_ptr + channels * 4 + 3, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight_ptr + channels * 4 + 2, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight_ptr + channels * 4 + 1, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(weight_ptr + channels * 4, mask=inside, other=0.0).to(tl.float32)
    x1 = _before(x_ptr, x_stride, ring, channels, inside, first_token - 1, start, begin, known, CHANNELS)
    x2 = _before(x_ptr, x_stride, ring, channels, inside, first_token - 2, start, begin, known, CHANNELS)
    x3 = _before(x_ptr, x_stride, ring, channels, inside, first_token - 3, start, begin, known, CHANNELS)
    length = tl.where(first_head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    # An iteration computes four tokens and loads the next four.
    a = _token(x_ptr, x_stride, channels, inside, first_token, stop)
    b = _token(x_ptr, x_stride, channels, inside, first_token + 1, stop)
    c = _token(x_ptr, x_stride, channels, inside, first_token + 2, stop)
    d = _token(x_ptr, x_stride, channels, inside, first_token + 3, stop)
    for behind in tl.range(0, stop - first_token, 4):
        token = first_token + behind
        next_a = _token(x_ptr, x_stride, channels, inside, token + 4, stop)
        next_b = _token(x_ptr, x_stride, channels, inside, token + 5, stop)
        next_c = _token(x_ptr, x_stride, channels, inside, token + 6, stop)
        next_d = _token(x_ptr, x_stride, channels, inside, token + 7, stop)
        out = out_ptr + token.to(tl.int64) * CHANNELS + channels
        x0 = a.to(tl.float32)
        _finish(out, x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3, is_value, length, inside, True)
        x3 = b.to(tl.float32)
        _finish(out + CHANNELS, x3 * w0 + x0 * w1 + x1 * w2 + x2 * w3, is_value, length, inside, token + 1 < stop)
        x2 = c.to(tl.float32)
        _finish(out + 2 * CHANNELS, x2 * w0 + x3 * w1 + x0 * w2 + x1 * w3, is_value, length, inside, token + 2 < stop)
        x1 = d.to(tl.float32)
        _finish(out + 3 * CHANNELS, x1 * w0 + x2 * w1 + x3 * w2 + x0 * w3, is_value, length, inside, token + 3 < stop)
        a = next_a
        b = next_b
        c = next_c
        d = next_d
    save = tl.load(saves_ptr + stop - 1).to(tl.int64)
    if save > 0:
        keep_inputs(
            conv_ptr + save * conv_stride, ring, x_ptr, x_stride, channels, inside, known, True,
            stop - 1, begin + stop - 1 - start, start, CHANNELS, 4,
        )  # fmt: skip


@triton.jit
def _token(x_ptr, x_stride, channels, inside, token, stop):
    """Load a token's inputs; zeros after the last token."""
    return tl.load(x_ptr + token.to(tl.int64) * x_stride + channels, mask=only_if(token < stop, inside), other=0.0)


@triton.jit
def _finish(out_ptr, total, is_value, length, inside, there):
    """Apply SiLU to a token [HEADS, BLOCK_D], normalise q and k, and store."""
    total = silu(total)
    scale = tl.math.rsqrt(tl.sum(total * total, axis=1) + 1e-6) * length
    total *= tl.where(is_value, 1.0, scale)[:, None]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=only_if(there, inside))


@triton.jit
def _before(x_ptr, x_stride, ring_ptr, channels, inside, token, start, begin, known, CHANNELS: tl.constexpr):
    """Load a token up to three before a program's first, float32. Tokens before the chunk come from the ring."""
    position = begin + token - start
    theirs = known & (token < start) & (position >= 0)
    at = x_ptr + token.to(tl.int64) * x_stride + channels
    x = tl.load(at, mask=only_if(token >= start, inside), other=0.0)
    x += tl.load(ring_ptr + (position + 4) % 4 * CHANNELS + channels, mask=only_if(theirs, inside), other=0.0)
    return x.to(tl.float32)


@dataclass(frozen=True, slots=True)
class ConvolveConfig:
    """How the kernel divides one shape. heads, tokens: how many a program has; powers of two."""

    heads: int
    tokens: int
    warps: int


def convolve(
    qkv: Tensor,
    state: RecurrentState,
    weights: DeltaWeights,
    batch: StateBatch,
    blocks: Blocks,
    config: ConvolveConfig,
) -> Tensor:
    """Return q / sqrt(key_dim), k and v of the chunks, [tokens, channels]. Write the rings of the slots in `saves`."""
    heads, first = weights.heads, batch.num_decodes
    overlap = launch_for(qkv.device).overlap
    out = torch.empty((len(qkv), heads.channels), dtype=qkv.dtype, device=qkv.device)
    parts = (2 * heads.key_heads + heads.value_heads) // config.heads
    _convolve_kernel[(blocks.most * (BLOCK // config.tokens), parts)](
        qkv, out, state.conv, weights.conv, batch.slots[first:], batch.sources[first:], batch.starts, batch.positions,
        batch.saves, blocks.chunks, blocks.tokens, qkv.stride(0), state.conv.stride(0),
        KEY_HEADS=heads.key_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim, CHANNELS=heads.channels,
        HEADS=config.heads, BLOCK=BLOCK, TOKENS=config.tokens,
        BLOCK_D=power_of_two(max(heads.key_dim, heads.value_dim)), OVERLAP=overlap, num_warps=config.warps,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
