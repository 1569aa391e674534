"""Computes the recurrence over the blocks of a chunk in one kernel.

A program has some columns of a head's state and goes through the chunk's blocks in order. Within a block, the products
of its tokens' queries and keys say how much each token reads of earlier tokens. Between blocks, only the state counts.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.elementwise import only_if, silu, softplus
from aengine.kernels.launch import Launch, power_of_two
from aengine.kernels.mamba.base import MambaWeights
from aengine.kernels.recurrent.blocks import Blocks
from aengine.kernels.recurrent.state import BLOCK, UNALIGNED, RecurrentHeads, RecurrentState, StateBatch
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _chunks_kernel(
    xbc_ptr,  # [tokens, CHANNELS]: after the convolution and SiLU
    z_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    dt_ptr,  # [tokens, VALUE_HEADS]
    out_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    recurrence_ptr,  # [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    a_log_ptr,  # [VALUE_HEADS]
    dt_bias_ptr,  # [VALUE_HEADS]
    skip_ptr,  # [VALUE_HEADS]
    slots_ptr,  # of chunks, like sources_ptr
    sources_ptr,
    starts_ptr,
    saves_ptr,
    block_starts_ptr,
    block_tokens_ptr,
    z_stride,
    dt_stride,
    recurrence_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = VALUES + 2 * KEYS
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    chunk = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    start = tl.load(starts_ptr + chunk)
    end = tl.load(starts_ptr + chunk + 1)
    if start >= end:
        return
    slot = tl.load(slots_ptr + chunk).to(tl.int64)
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) % PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = v < VALUE_DIM
    dtype = xbc_ptr.dtype.element_ty
    if slot <= 0:
        for at in range(start, end, BLOCK):
            there = (at + i < end)[:, None] & in_v[None, :]
            out = out_ptr + (at + i).to(tl.int64)[:, None] * VALUES + head * VALUE_DIM + v[None, :]
            tl.store(out, tl.zeros([BLOCK, BLOCK_V], dtype), mask=there)
        return
    first_block = tl.load(block_starts_ptr + chunk)
    end_block = tl.load(block_starts_ptr + chunk + 1)
    first_token = tl.load(block_tokens_ptr + first_block)
    source = tl.load(sources_ptr + chunk).to(tl.int64)
    matrix = head * (KEY_DIM * VALUE_DIM) + d[:, None] * VALUE_DIM + v[None, :]
    in_matrix = (d < KEY_DIM)[:, None] & in_v[None, :]
    old = tl.load(recurrence_ptr + source * recurrence_stride + matrix, mask=only_if(source > 0, in_matrix), other=0.0)
    s = old.to(tl.float32)
    a = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    for block in tl.range(first_block, end_block, num_stages=STAGES):
        token = first_token + (block - first_block) * BLOCK + i
        there = (token >= start) & (token < end)
        wide = token.to(tl.int64)
        in_keys = there[:, None] & (d < KEY_DIM)[None, :]
        in_values = there[:, None] & in_v[None, :]
        row = xbc_ptr + wide[:, None] * CHANNELS
        k_at = row + VALUES + head // REPEATS * KEY_DIM + d[None, :]
        x = tl.load(row + head * VALUE_DIM + v[None, :], mask=in_values, other=0.0).to(tl.float32)
        k = tl.load(k_at, mask=in_keys, other=0.0)
        q = tl.load(k_at + KEYS, mask=in_keys, other=0.0)
        dt = tl.load(dt_ptr + wide * dt_stride + head, mask=there, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + wide[:, None] * z_stride + head * VALUE_DIM + v[None, :], mask=in_values, other=0.0)
        step = tl.where(there, softplus(dt + dt_bias), 0.0)
        fade = tl.cumsum(a * step, axis=0)
        total = tl.sum(a * step, axis=0)
        # The decay of each token's correction until another token reads it; zero for later corrections.
        left = tl.exp(tl.where(i[:, None] >= i[None, :], fade[:, None] - fade[None, :], float("-inf")))
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * left
        correction = x * step[:, None]
        o = tl.dot(q, s.to(dtype), input_precision=PRECISION) * tl.exp(fade)[:, None]
        o = tl.dot(seen.to(dtype), correction.to(dtype), o, input_precision=PRECISION)
        o = (o + skip * x) * silu(z.to(tl.float32))
        tl.store(out_ptr + wide[:, None] * VALUES + head * VALUE_DIM + v[None, :], o.to(dtype), mask=in_values)
        kept = (correction * tl.exp(total - fade)[:, None]).to(dtype)
        s = tl.dot(tl.trans(k), kept, s * tl.exp(total), input_precision=PRECISION)
        last = tl.minimum(first_token + (block - first_block + 1) * BLOCK, end) - 1
        save = tl.load(saves_ptr + last).to(tl.int64)
        if save > 0:
            tl.store(recurrence_ptr + save * recurrence_stride + matrix, s.to(old.dtype), mask=in_matrix)
    tl.store(recurrence_ptr + slot * recurrence_stride + matrix, s.to(old.dtype), mask=in_matrix)


@dataclass(frozen=True, slots=True)
class ChunksConfig:
    """How the kernel divides one shape. block_v: columns of a program."""

    block_v: int
    warps: int
    stages: int


@lru_cache
def chunks_config(heads: RecurrentHeads, element_size: int, launch: Launch) -> ChunksConfig:
    """Return the config for a shape. With less shared memory the pipeline has fewer stages."""
    block_v, keys = min(32, max(16, power_of_two(heads.value_dim))), max(16, power_of_two(heads.key_dim))
    block = BLOCK * (2 * keys + 2 * block_v) * element_size
    own = (keys * block_v + BLOCK * BLOCK + BLOCK * block_v) * element_size
    stages = max((n for n in (1, 2) if n * block + own <= launch.shared_memory), default=1)
    return ChunksConfig(block_v, 4, stages)


def run_chunks(
    out: Tensor, xbc: Tensor, z: Tensor, dt: Tensor, state: RecurrentState, weights: MambaWeights, batch: StateBatch,
    config: ChunksConfig,
) -> None:  # fmt: skip
    """Write the chunks' results to out [tokens, values], contiguous, and their new states to their slots.

    xbc: after the convolution and SiLU, contiguous. Other arguments as in `Mamba`.
    """
    heads, first = weights.heads, batch.num_decodes
    blocks = batch.plan(Blocks, lambda: Blocks.from_batch(batch))
    parts = -(-heads.value_dim // config.block_v)
    _chunks_kernel[(heads.value_heads * parts, batch.num_chunks)](
        xbc, z, dt, out, state.recurrence, weights.a_log, weights.dt_bias, weights.skip,
        batch.slots[first:], batch.sources[first:], batch.starts, batch.saves, blocks.starts, blocks.tokens,
        z.stride(0), dt.stride(0), state.recurrence.stride(0),
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        BLOCK=BLOCK, BLOCK_K=max(16, power_of_two(heads.key_dim)), BLOCK_V=config.block_v, STAGES=config.stages,
        PRECISION="ieee" if xbc.dtype == torch.float32 else "tf32", num_warps=config.warps,
    )  # fmt: skip
