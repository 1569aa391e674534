"""Prepares the inputs of attention in one kernel: norms, rotations, and the writes into the KV pages."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.attention.codes import to_cache_dtype
from aengine.kernels.attention.heads import Heads, LatentHeads
from aengine.kernels.kv_scales import FP8, NO_SCALES, KVScales
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@triton.jit
def _weighted(x, scale, weight):
    """Return x * scale * weight. Rounds to the model's dtype before applying the weight, like the reference."""
    return ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def _load_halves(ptr, low_columns, high_columns, exists, PRESENT: tl.constexpr):
    """Load both halves of heads. exists: a mask of columns; None: all."""
    low = tl.zeros(low_columns.shape, ptr.dtype.element_ty)
    high = low
    if PRESENT and exists is None:
        low = tl.load(ptr + low_columns)
        high = tl.load(ptr + high_columns)
    elif PRESENT:
        low = tl.load(ptr + low_columns, mask=exists, other=0.0)
        high = tl.load(ptr + high_columns, mask=exists, other=0.0)
    return low, high


@triton.jit
def _store_halves(ptr, low, high, heads, offset, mask, low_columns, high_columns, exists, DIM: tl.constexpr):
    """Store both halves [TILE, DIM / 2, padded] of heads `offset + heads` to a tensor [..., DIM].

    exists: as in `_load_halves`.
    """
    if exists is not None:
        mask = mask & exists[None, :]
    place = ptr + (offset + heads).to(tl.int64)[:, None] * DIM
    tl.store(place + low_columns[None, :], low, mask=mask)
    tl.store(place + high_columns[None, :], high, mask=mask)


@keep_variants
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _qk_norm_rope_store_kernel(
    qkv_ptr,  # [tokens, heads, DIM]: HEADS (GATED: each followed by one to skip), then keys, then values
    q_weight_ptr,  # [DIM], with Q_NORM
    k_weight_ptr,  # [DIM], with K_NORM
    cos_sin_ptr,  # [max_positions, ROTATED] float32: cosines, then sines
    positions_ptr,  # [tokens]
    slots_ptr,  # [tokens]
    k_cache_ptr,  # [pages * page_size, KV_HEADS, DIM]
    v_cache_ptr,
    q_ptr,  # [tokens, HEADS, DIM]
    eps,
    k_inverse,  # 1 / scale of keys in an FP8 cache
    v_inverse,  # the same for values
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,  # the next power of two from DIM / 2
    ROTATED: tl.constexpr,  # how many elements of a head, the first ones, are rotated
    VECTOR: tl.constexpr,  # so many columns are contiguous, and begin at a multiple of VECTOR
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
    GATED: tl.constexpr,
    V_NORM: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # rotated pairs are neighbours
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # Element i is rotated with i + ROTATED / 2, or 2 i with 2 i + 1. The pairs of other elements do not matter.
    columns = tl.arange(0, HALF_PAD)
    exists = None
    if HALF_PAD != DIM // 2:
        exists = columns < DIM // 2
    low_columns = columns
    high_columns = DIM // 2 + columns
    if ROTATED < DIM:
        turned = columns < ROTATED // 2
        low_columns = tl.where(turned, columns, columns + ROTATED // 2)
        high_columns = tl.where(turned, columns + ROTATED // 2, columns + DIM // 2)
    if INTERLEAVED and ROTATED < DIM:
        low_columns = tl.where(turned, columns * 2, low_columns)
        high_columns = tl.where(turned, columns * 2 + 1, high_columns)
    elif INTERLEAVED:
        low_columns = columns * 2
        high_columns = columns * 2 + 1
    elif ROTATED < DIM:
        low_columns = tl.max_contiguous(tl.multiple_of(low_columns, VECTOR), VECTOR)
        high_columns = tl.max_contiguous(tl.multiple_of(high_columns, VECTOR), VECTOR)
    if OVERLAP:
        gdc_launch_dependents()
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    angle = cos_sin_ptr + position * ROTATED + columns
    if ROTATED < DIM:
        cos = tl.load(angle, mask=turned, other=1.0)[None, :]
        sin = tl.load(angle + ROTATED // 2, mask=turned, other=0.0)[None, :]
    elif exists is None:
        cos = tl.load(angle)[None, :]
        sin = tl.load(angle + DIM // 2)[None, :]
    else:
        cos = tl.load(angle, mask=exists, other=1.0)[None, :]
        sin = tl.load(angle + DIM // 2, mask=exists, other=0.0)[None, :]
    # Weights are loaded before the wait, while the product before this kernel ends.
    q_low, q_high = _load_halves(q_weight_ptr, low_columns, high_columns, exists, Q_NORM)
    k_low, k_high = _load_halves(k_weight_ptr, low_columns, high_columns, exists, K_NORM)
    if OVERLAP:
        gdc_wait()

    inside = (heads < HEADS + 2 * KV_HEADS)[:, None]
    is_q = (heads < HEADS)[:, None]
    is_k = ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None]
    is_v = (heads >= HEADS + KV_HEADS)[:, None] & inside
    places = heads + tl.minimum(heads, HEADS) if GATED else heads
    if KEYS_ARE_VALUES:
        places = tl.where(heads >= HEADS + KV_HEADS, places - KV_HEADS, places)
    source = qkv_ptr + token * qkv_stride + places[:, None] * DIM
    loaded = inside
    if exists is not None:
        loaded = inside & exists[None, :]
    low = tl.load(source + low_columns[None, :], mask=loaded, other=0.0)
    high = tl.load(source + high_columns[None, :], mask=loaded, other=0.0)
    kept: tl.constexpr = v_cache_ptr.dtype.element_ty
    v_offset = slot * KV_HEADS - HEADS - KV_HEADS
    if not V_NORM:
        v_low = to_cache_dtype(low, v_inverse, kept)
        v_high = to_cache_dtype(high, v_inverse, kept)
        _store_halves(v_cache_ptr, v_low, v_high, heads, v_offset, is_v, low_columns, high_columns, exists, DIM)

    if Q_NORM or K_NORM or V_NORM:
        squares = low.to(tl.float32) * low.to(tl.float32) + high.to(tl.float32) * high.to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(squares, axis=1) / DIM + eps)[:, None]
    if V_NORM:
        v_low = to_cache_dtype((low.to(tl.float32) * scale).to(low.dtype), v_inverse, kept)
        v_high = to_cache_dtype((high.to(tl.float32) * scale).to(high.dtype), v_inverse, kept)
        _store_halves(v_cache_ptr, v_low, v_high, heads, v_offset, is_v, low_columns, high_columns, exists, DIM)
    normed_low = low
    normed_high = high
    if Q_NORM:
        normed_low = tl.where(is_q, _weighted(low, scale, q_low), normed_low)
        normed_high = tl.where(is_q, _weighted(high, scale, q_high), normed_high)
    if K_NORM:
        normed_low = tl.where(is_k, _weighted(low, scale, k_low), normed_low)
        normed_high = tl.where(is_k, _weighted(high, scale, k_high), normed_high)
    wide_low = normed_low.to(tl.float32)
    wide_high = normed_high.to(tl.float32)
    low = (wide_low * cos - wide_high * sin).to(low.dtype)
    high = (wide_high * cos + wide_low * sin).to(high.dtype)
    _store_halves(q_ptr, low, high, heads, token * HEADS, is_q, low_columns, high_columns, exists, DIM)
    k_low = to_cache_dtype(low, k_inverse, kept)
    k_high = to_cache_dtype(high, k_inverse, kept)
    k_offset = slot * KV_HEADS - HEADS
    _store_halves(k_cache_ptr, k_low, k_high, heads, k_offset, is_k, low_columns, high_columns, exists, DIM)


def _tile(tokens: int, heads: int) -> int:
    """Return how many heads a program has. For many tokens it leaves few threads idle; for few tokens it is small."""
    if tokens < 64:
        return min(4, power_of_two(heads))
    return min((16, 8, 4), key=lambda tile: -(-heads // tile) * tile) if heads > 8 else power_of_two(heads)


def qk_norm_rope_store(
    qkv: Tensor,
    heads: Heads,
    cos_sin: Tensor,
    positions: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: KVScales = NO_SCALES,
    out: Tensor | None = None,
) -> Tensor:
    """Like `Kernels.qk_norm_rope_store`, for qkv whose last axis is contiguous.

    Raises ValueError if the caches are not contiguous or dim is odd.
    """
    tokens = qkv.shape[0]
    k_cache, v_cache = cache
    kv_heads, dim = k_cache.shape[2:]
    if heads.kv == "nothing":
        kv_heads = 0
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV caches must be contiguous")
    if dim % 2:
        raise ValueError(f"head_dim must be even, got {dim}")
    q = qkv.new_empty(tokens, heads.count, dim) if out is None else out
    count = heads.count + 2 * kv_heads
    tile = _tile(tokens, count)
    half_pad, overlap = power_of_two(dim // 2), launch_for(qkv.device).overlap
    vector = math.gcd(16, dim // 2, cos_sin.shape[1] // 2)
    if tokens:
        _qk_norm_rope_store_kernel[(tokens, triton.cdiv(count, tile))](
            qkv, qkv if heads.q_norm is None else heads.q_norm, qkv if heads.k_norm is None else heads.k_norm,
            cos_sin, positions, slots, k_cache, v_cache, q, heads.eps, 1.0 / scales.key, 1.0 / scales.value,
            qkv.stride(0),
            HEADS=heads.count, KV_HEADS=kv_heads, DIM=dim, HALF_PAD=half_pad, ROTATED=cos_sin.shape[1],
            VECTOR=vector, Q_NORM=heads.q_norm is not None, K_NORM=heads.k_norm is not None,
            TILE=tile, OVERLAP=overlap, GATED=heads.gated, V_NORM=heads.v_norm, KEYS_ARE_VALUES=heads.kv == "keys",
            INTERLEAVED=heads.interleaved,
            num_warps=max(1, tile * half_pad // 256), launch_pdl=overlap,
        )  # fmt: skip
    return q


@keep_variants
@triton.jit(
    do_not_specialize=["latent_stride", "q_stride"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _latent_inputs_kernel(
    latent_ptr,  # [tokens, RANK + ROTATED]
    q_ptr,  # [tokens, HEADS, PLAIN + ROTATED]
    weight_ptr,  # [RANK]
    cos_sin_ptr,  # [max_positions, ROTATED] float32: cosines, then sines
    positions_ptr,  # [tokens]
    slots_ptr,  # [tokens]
    cache_ptr,  # [slots, RANK + ROTATED]
    out_ptr,  # [tokens, HEADS, RANK + ROTATED]: the last ROTATED of each head are written
    latent_stride,
    q_stride,
    eps,
    inverse,  # 1 / scale of an FP8 cache
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # pairs are neighbours
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROTATED // 2
    columns = tl.arange(0, RANK_PAD)
    half = tl.arange(0, HALF_PAD)
    low = half * 2 if INTERLEAVED else half
    high = low + (1 if INTERLEAVED else HALF)
    if OVERLAP:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + columns, mask=columns < RANK, other=0.0).to(tl.float32)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * ROTATED + half
    cos = tl.load(angles, mask=half < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=half < HALF, other=0.0)
    kept = cache_ptr + tl.load(slots_ptr + token) * (RANK + ROTATED)
    if OVERLAP:
        gdc_wait()
    dtype = out_ptr.dtype.element_ty
    latent = latent_ptr + token * latent_stride
    wide = tl.load(latent + columns, mask=columns < RANK, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
    # Round to the model's dtype before the weight, like the reference.
    normed = ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    kind = cache_ptr.dtype.element_ty
    tl.store(kept + columns, to_cache_dtype(normed, inverse, kind), mask=columns < RANK)
    first = tl.load(latent + RANK + low, mask=half < HALF, other=0.0).to(tl.float32)
    second = tl.load(latent + RANK + high, mask=half < HALF, other=0.0).to(tl.float32)
    low_end, high_end = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
    tl.store(kept + RANK + half, to_cache_dtype(low_end, inverse, kind), mask=half < HALF)
    tl.store(kept + RANK + HALF + half, to_cache_dtype(high_end, inverse, kind), mask=half < HALF)

    heads = tl.arange(0, HEADS_PAD)[:, None]
    inside = (heads < HEADS) & (half < HALF)[None, :]
    q = q_ptr + token * q_stride + heads * (PLAIN + ROTATED) + PLAIN
    first = tl.load(q + low[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(q + high[None, :], mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + (token * HEADS + heads) * (RANK + ROTATED) + RANK + half[None, :]
    tl.store(out, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=inside)
    tl.store(out + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=inside)


def latent_inputs(
    latents: Tensor, q: Tensor, heads: LatentHeads, cos_sin: Tensor, positions: Tensor, cache: Tensor, slots: Tensor,
    out: Tensor, scale: float = 1.0,
) -> None:  # fmt: skip
    """Like `Kernels.latent_inputs`, for a cache of q's dtype or FP8. Raises ValueError for another layout."""
    tokens = len(latents)
    if cache.dtype not in (q.dtype, FP8) or not (
        cache.is_contiguous() and out.is_contiguous() and latents.stride(1) == 1
    ):
        raise ValueError(f"the cache must be contiguous, in {q.dtype} or FP8, got {cache.dtype}")
    q = q.contiguous()
    overlap = launch_for(q.device).overlap
    if tokens:
        _latent_inputs_kernel[(tokens,)](
            latents, q, heads.weight, cos_sin, positions, slots, cache, out,
            latents.stride(0), q.stride(0), heads.eps, 1.0 / scale,
            HEADS=q.shape[1], PLAIN=q.shape[2] - heads.rotated, RANK=heads.rank, ROTATED=heads.rotated,
            HEADS_PAD=power_of_two(q.shape[1]), RANK_PAD=power_of_two(heads.rank),
            HALF_PAD=power_of_two(heads.rotated // 2), INTERLEAVED=heads.interleaved, OVERLAP=overlap, num_warps=4,
            launch_pdl=overlap,
        )  # fmt: skip
