"""The convolution of chunks: q, k and v of their tokens, q and k of length 1.

The inputs of tokens before a chunk lie in the ring of the slot that it begins with. That ring may be the one it ends
in, which is written by a later kernel therefore.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.delta.base import BLOCK, DeltaState, DeltaWeights, StateBatch
from aengine.kernels.delta.blocks import Blocks
from aengine.kernels.delta.gates import only_if, silu
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@triton.jit
def keep_inputs(
    to_ptr, ring_ptr, x_ptr, x_stride, channels, inside, known, copies, token, position, start,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the ring behind a token; what lies before its chunk comes from another ring, if `copies`."""
    for back in tl.static_range(WIDTH):
        row = (position + WIDTH - back) % WIDTH * CHANNELS + channels
        ours = token - back >= start
        x = tl.load(x_ptr + (token - back).to(tl.int64) * x_stride + channels, mask=only_if(ours, inside), other=0.0)
        if copies:
            theirs = known & (token - back < start) & (position >= back)
            x += tl.load(ring_ptr + row, mask=only_if(theirs, inside), other=0.0)
        tl.store(to_ptr + row, x, mask=only_if(ours | copies, inside))


@keep_variants
@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "sources_ptr", "starts_ptr", "positions_ptr", "saves_ptr"])
def _convolve_kernel(
    x_ptr,  # [tokens, CHANNELS]
    out_ptr,  # [tokens, CHANNELS]
    conv_ptr,  # [slots, WIDTH, CHANNELS]
    weight_ptr,  # [CHANNELS, WIDTH]
    slots_ptr,  # of chunks, as the next one
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
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    part = tl.program_id(1)  # heads of q, of k, of v
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
    first_token = tl.load(block_tokens_ptr + block)
    begin = tl.load(positions_ptr + start).to(tl.int32)  # the position of the chunk's first token
    d = tl.arange(0, BLOCK_D)
    is_value = part >= 2 * KEY_HEADS
    inside = d < tl.where(is_value, VALUE_DIM, KEY_DIM)
    first_channel = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (part - 2 * KEY_HEADS) * VALUE_DIM, part * KEY_DIM)
    channels = first_channel + d
    ring = conv_ptr + source * conv_stride
    token = first_token + tl.arange(0, BLOCK)
    there = (token >= start) & (token < end)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for back in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0).to(tl.float32)
        ours = there & (token - back >= start)
        x = tl.load(
            x_ptr + (token - back).to(tl.int64)[:, None] * x_stride + channels[None, :],
            mask=ours[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += x.to(tl.float32) * weight[None, :]
    if first_token < start + WIDTH - 1:  # tokens that see what came before the chunk
        for back in tl.static_range(1, WIDTH):
            weight = tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0).to(tl.float32)
            position = begin + (token - start) - back
            theirs = only_if(known, there & (token - back < start) & (position >= 0))
            x = tl.load(
                ring + ((position + WIDTH) % WIDTH * CHANNELS)[:, None] + channels[None, :],
                mask=theirs[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            total += x.to(tl.float32) * weight[None, :]
    total = silu(total)
    if part < 2 * KEY_HEADS:
        scale = tl.math.rsqrt(tl.sum(total * total, axis=1) + 1e-6)
        total *= (scale * tl.where(part < KEY_HEADS, KEY_DIM**-0.5, 1.0))[:, None]
    tl.store(
        out_ptr + token.to(tl.int64)[:, None] * CHANNELS + channels[None, :], total.to(out_ptr.dtype.element_ty),
        mask=there[:, None] & inside[None, :],
    )  # fmt: skip
    last = tl.minimum(first_token + BLOCK, end) - 1
    save = tl.load(saves_ptr + last).to(tl.int64)
    if save > 0:
        keep_inputs(
            conv_ptr + save * conv_stride, ring, x_ptr, x_stride, channels, inside, known, True,
            last, begin + last - start, start, CHANNELS, WIDTH,
        )  # fmt: skip


def convolve(qkv: Tensor, state: DeltaState, weights: DeltaWeights, batch: StateBatch, blocks: Blocks) -> Tensor:
    """qkv [tokens, channels] -> q / sqrt(key_dim), k, v of the same shape, where a chunk has tokens. Saves rings."""
    heads, first = weights.heads, batch.num_decodes
    overlap = launch_for(qkv.device).overlap
    out = torch.empty((len(qkv), heads.channels), dtype=qkv.dtype, device=qkv.device)
    _convolve_kernel[(blocks.most, 2 * heads.key_heads + heads.value_heads)](
        qkv, out, state.conv, weights.conv, batch.slots[first:], batch.sources[first:], batch.starts, batch.positions,
        batch.saves, blocks.chunks, blocks.tokens, qkv.stride(0), state.conv.stride(0),
        KEY_HEADS=heads.key_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim, CHANNELS=heads.channels,
        WIDTH=weights.conv.shape[1], BLOCK=BLOCK, BLOCK_D=power_of_two(max(heads.key_dim, heads.value_dim)),
        OVERLAP=overlap, num_warps=4, maxnreg=128, launch_pdl=overlap,
    )  # fmt: skip
    return out
