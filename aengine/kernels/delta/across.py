"""Computes the recurrence over the blocks of a chunk, and the chunk's results.

A program has some columns of a value head's state and goes through the chunk's blocks in order. It subtracts S^T k from
the values. The inverse of the triangular system turns the differences into corrections. The queries read the state
and, through `seen`, the corrections. Then the corrections are added to the state.
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
from aengine.kernels.delta.within import Within
from aengine.kernels.elementwise import gated_norm, only_if
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.recurrent.blocks import Blocks
from aengine.kernels.recurrent.state import BLOCK, UNALIGNED, RecurrentState, StateBatch
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _across_kernel(
    qkv_ptr,  # [tokens, CHANNELS]: after the convolution
    z_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    out_ptr,  # [tokens, VALUE_HEADS * VALUE_DIM]
    solved_ptr,
    seen_ptr,
    fade_ptr,
    beta_ptr,
    recurrence_ptr,  # [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    norm_ptr,
    slots_ptr,  # of chunks, like sources_ptr
    sources_ptr,
    starts_ptr,
    saves_ptr,
    block_starts_ptr,
    block_tokens_ptr,
    z_stride,
    recurrence_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    REPEATS: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    PARTS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
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
    first_block = tl.load(block_starts_ptr + chunk)
    end_block = tl.load(block_starts_ptr + chunk + 1)
    first_token = tl.load(block_tokens_ptr + first_block)
    dtype = qkv_ptr.dtype.element_ty
    if slot <= 0:
        for at in range(start, end, BLOCK):
            there = (at + i < end)[:, None] & in_v[None, :]
            out = out_ptr + (at + i).to(tl.int64)[:, None] * VALUES + head * VALUE_DIM + v[None, :]
            tl.store(out, tl.zeros([BLOCK, BLOCK_V], dtype), mask=there)
        return
    source = tl.load(sources_ptr + chunk).to(tl.int64)
    matrix = head * (KEY_DIM * VALUE_DIM) + d[:, None] * VALUE_DIM + v[None, :]
    in_matrix = (d < KEY_DIM)[:, None] & in_v[None, :]
    old = tl.load(recurrence_ptr + source * recurrence_stride + matrix, mask=only_if(source > 0, in_matrix), other=0.0)
    s = old.to(tl.float32)
    norm = tl.load(norm_ptr + v, mask=in_v, other=0.0)
    for block in tl.range(first_block, end_block, num_stages=STAGES):
        nth = block - first_block
        token = first_token + nth * BLOCK + i
        there = (token >= start) & (token < end)
        wide = token.to(tl.int64)
        in_keys = there[:, None] & (d < KEY_DIM)[None, :]
        in_values = there[:, None] & in_v[None, :]
        q_at = qkv_ptr + wide[:, None] * CHANNELS + head // REPEATS * KEY_DIM + d[None, :]
        v_at = qkv_ptr + wide[:, None] * CHANNELS + 2 * KEYS + head * VALUE_DIM + v[None, :]
        of_block = (first_block + nth).to(tl.int64) * VALUE_HEADS + head
        square = of_block * (BLOCK * BLOCK) + i[:, None] * BLOCK + i[None, :]
        k = tl.load(q_at + KEYS, mask=in_keys, other=0.0)
        value = tl.load(v_at, mask=in_values, other=0.0)
        solved = tl.load(solved_ptr + square)
        q = tl.load(q_at, mask=in_keys, other=0.0)
        seen = tl.load(seen_ptr + square)
        fade = tl.load(fade_ptr + of_block * BLOCK + i)
        beta = tl.load(beta_ptr + of_block * BLOCK + i)
        total = tl.load(fade_ptr + of_block * BLOCK + (BLOCK - 1))
        kept = s.to(dtype)
        decay = tl.exp(fade)
        found = tl.dot(k, kept, input_precision=PRECISION) * decay[:, None]
        wrong = ((value.to(tl.float32) - found) * beta[:, None]).to(dtype)
        written = tl.dot(solved, wrong, input_precision=PRECISION)
        o = tl.dot(q, kept, input_precision=PRECISION) * decay[:, None]
        o = tl.dot(seen, written.to(dtype), o, input_precision=PRECISION)
        left = (written * tl.exp(total - fade)[:, None]).to(dtype)
        s = tl.dot(tl.trans(k), left, s * tl.exp(total), input_precision=PRECISION)
        if BLOCK_V >= VALUE_DIM:
            z_at = z_ptr + wide[:, None] * z_stride + head * VALUE_DIM + v[None, :]
            z = tl.load(z_at, mask=in_values, other=0.0).to(tl.float32)
            o = gated_norm(o, z, norm[None, :], eps, 1, VALUE_DIM)
        tl.store(out_ptr + wide[:, None] * VALUES + head * VALUE_DIM + v[None, :], o.to(dtype), mask=in_values)
        last = tl.minimum(first_token + (nth + 1) * BLOCK, end) - 1
        save = tl.load(saves_ptr + last).to(tl.int64)
        if save > 0:
            tl.store(recurrence_ptr + save * recurrence_stride + matrix, s.to(old.dtype), mask=in_matrix)
    tl.store(recurrence_ptr + slot * recurrence_stride + matrix, s.to(old.dtype), mask=in_matrix)


@keep_variants
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=UNALIGNED)
def _norm_kernel(
    z_ptr,
    out_ptr,  # [tokens, VALUES], in place
    norm_ptr,
    starts_ptr,
    z_stride,
    tokens,
    eps,
    VALUES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    HEADS: tl.constexpr = VALUES // VALUE_DIM
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS) + tl.load(starts_ptr) * HEADS
    v = tl.arange(0, BLOCK_V)
    there = (at < tokens * HEADS)[:, None] & (v < VALUE_DIM)[None, :]
    out = out_ptr + at[:, None] * VALUE_DIM + v[None, :]
    o = tl.load(out, mask=there, other=0.0).to(tl.float32)
    z_at = z_ptr + (at // HEADS)[:, None] * z_stride + (at % HEADS * VALUE_DIM)[:, None] + v[None, :]
    z = tl.load(z_at, mask=there, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + v, mask=v < VALUE_DIM, other=0.0)
    tl.store(out, gated_norm(o, z, norm[None, :], eps, 1, VALUE_DIM).to(out_ptr.dtype.element_ty), mask=there)


@dataclass(frozen=True, slots=True)
class AcrossConfig:
    """How the kernels divide one shape. block_v: columns of a program; if a head has more, a second kernel norms it."""

    block_v: int
    warps: int
    stages: int


def run_across(
    out: Tensor,
    qkv: Tensor,
    z: Tensor,
    within: Within,
    state: RecurrentState,
    weights: DeltaWeights,
    batch: StateBatch,
    blocks: Blocks,
    config: AcrossConfig,
) -> None:
    """Write the chunks' results to out [tokens, values], contiguous, and their new states to their slots."""
    heads, first = weights.heads, batch.num_decodes
    overlap, exact = launch_for(qkv.device).overlap, qkv.dtype == torch.float32
    block_v = min(config.block_v, power_of_two(heads.value_dim))
    _across_kernel[(-(-heads.value_dim // block_v) * heads.value_heads, batch.num_chunks)](
        qkv, z, out, within.solved, within.seen, within.fade, within.beta, state.recurrence, weights.norm,
        batch.slots[first:], batch.sources[first:], batch.starts, batch.saves, blocks.starts, blocks.tokens,
        z.stride(0), state.recurrence.stride(0), weights.eps,
        KEY_HEADS=heads.key_heads, VALUE_HEADS=heads.value_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        BLOCK=BLOCK, BLOCK_K=power_of_two(heads.key_dim), BLOCK_V=block_v, STAGES=config.stages,
        PRECISION="ieee" if exact else "tf32", OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap,
    )  # fmt: skip
    if block_v < heads.value_dim:
        rows = 16
        _norm_kernel[(-(-len(qkv) * heads.value_heads // rows),)](
            z, out, weights.norm, batch.starts, z.stride(0), len(qkv), weights.eps,
            VALUES=heads.values, VALUE_DIM=heads.value_dim, ROWS=rows, BLOCK_V=power_of_two(heads.value_dim),
            OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
