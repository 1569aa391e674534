"""Per-head norm of queries and keys, rotary embedding, and the write into the KV pages, as one kernel."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two

HEADS_PER_PROGRAM = 8


@triton.jit
def _normalise(x, weight_ptr, columns, scale):
    weight = tl.load(weight_ptr + columns).to(tl.float32)[None, :]
    return ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr,  # [tokens, HEADS + 2 * KV_HEADS, DIM]
    q_weight_ptr,  # [DIM], NORM only
    k_weight_ptr,  # [DIM], NORM only
    cos_sin_ptr,  # [max_positions, ROPE_DIM] float32
    positions_ptr,  # [tokens]
    slots_ptr,  # [tokens]
    k_cache_ptr,  # [pages * page_size, KV_HEADS, DIM]
    v_cache_ptr,
    q_ptr,  # [tokens, HEADS, DIM]
    k_ptr,  # [tokens, KV_HEADS, DIM]
    eps,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, DIM)
    # Rotate-half: column c is rotated against c + half, and c + half against c; columns past ROPE_DIM stay.
    half: tl.constexpr = ROPE_DIM // 2
    turns = columns < ROPE_DIM
    lower = columns < half
    partner = tl.where(turns, tl.where(lower, columns + half, columns - half), columns)
    if OVERLAP:
        gdc_launch_dependents()
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    angle = tl.where(lower, columns, columns - half)
    cos = tl.load(cos_sin_ptr + position * ROPE_DIM + angle, mask=turns, other=1.0)
    sin = tl.load(cos_sin_ptr + position * ROPE_DIM + half + angle, mask=turns, other=0.0)
    sin = tl.where(lower, -sin, sin)
    if OVERLAP:
        gdc_wait()

    inside = (heads < HEADS + 2 * KV_HEADS)[:, None]
    is_q = (heads < HEADS)[:, None]
    is_k = ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None]
    is_v = (heads >= HEADS + KV_HEADS)[:, None] & inside
    source = qkv_ptr + token * qkv_stride + heads[:, None] * DIM
    x = tl.load(source + columns[None, :], mask=inside, other=0.0)
    other = tl.load(source + partner[None, :], mask=inside, other=0.0)
    rotated = x
    crossed = other
    if Q_NORM or K_NORM:
        wide = x.to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        if Q_NORM:
            rotated = tl.where(is_q, _normalise(x, q_weight_ptr, columns, scale), rotated)
            crossed = tl.where(is_q, _normalise(other, q_weight_ptr, partner, scale), crossed)
        if K_NORM:
            rotated = tl.where(is_k, _normalise(x, k_weight_ptr, columns, scale), rotated)
            crossed = tl.where(is_k, _normalise(other, k_weight_ptr, partner, scale), crossed)
    rotated = (rotated.to(tl.float32) * cos[None, :] + crossed.to(tl.float32) * sin[None, :]).to(x.dtype)

    key_head = heads - HEADS
    value_head = heads - HEADS - KV_HEADS
    tl.store(q_ptr + (token * HEADS + heads[:, None]) * DIM + columns[None, :], rotated, mask=is_q)
    tl.store(k_ptr + (token * KV_HEADS + key_head[:, None]) * DIM + columns[None, :], rotated, mask=is_k)
    tl.store(k_cache_ptr + (slot * KV_HEADS + key_head[:, None]) * DIM + columns[None, :], rotated, mask=is_k)
    tl.store(v_cache_ptr + (slot * KV_HEADS + value_head[:, None]) * DIM + columns[None, :], x, mask=is_v)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm (where a weight is given), rotate, and write K and V at `slots`; returns q, k, v.

    qkv [tokens, (heads + 2 kv_heads) * dim], its last axis contiguous; cos_sin [max_positions, rope_dim] float32, the cosines
    then the sines; k_cache, v_cache [pages, page_size, kv_heads, dim], contiguous; slots [tokens] = page * page_size + offset.
    The returned v is a view of qkv. Raises ValueError where the caches are not contiguous or dim is no power of two.
    """
    tokens = qkv.shape[0]
    kv_heads, dim = k_cache.shape[2:]
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV caches must be contiguous")
    if dim & (dim - 1):
        raise ValueError(f"head_dim must be a power of two, got {dim}")
    q = qkv.new_empty(tokens, num_heads, dim)
    k = qkv.new_empty(tokens, kv_heads, dim)
    v = qkv[:, (num_heads + kv_heads) * dim :].unflatten(1, (kv_heads, dim))
    heads = num_heads + 2 * kv_heads
    tile = min(HEADS_PER_PROGRAM, power_of_two(heads))
    overlap = launch_for(qkv.device).overlap
    if tokens:
        _qk_norm_rope_store_kernel[(tokens, triton.cdiv(heads, tile))](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos_sin, positions, slots,
            k_cache, v_cache, q, k, eps, qkv.stride(0),
            HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, ROPE_DIM=cos_sin.shape[1],
            Q_NORM=q_weight is not None, K_NORM=k_weight is not None, TILE=tile, OVERLAP=overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return q, k, v
