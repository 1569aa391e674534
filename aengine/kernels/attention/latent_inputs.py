"""What attention over latents reads, made of projections: norm and rotation of latents, their place in the cache, and
the rotation of queries, in one kernel."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.attention.codes import as_kept
from aengine.kernels.attention.latent_heads import LatentHeads
from aengine.kernels.kv_scales import FP8
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


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
    inverse,  # of the scale of an FP8 cache
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # neighbours are pairs to be rotated
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
    # Rounded to the model's dtype before the weight, as the reference does.
    normed = ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    kind = cache_ptr.dtype.element_ty
    tl.store(kept + columns, as_kept(normed, inverse, kind), mask=columns < RANK)
    first = tl.load(latent + RANK + low, mask=half < HALF, other=0.0).to(tl.float32)
    second = tl.load(latent + RANK + high, mask=half < HALF, other=0.0).to(tl.float32)
    low_end, high_end = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
    tl.store(kept + RANK + half, as_kept(low_end, inverse, kind), mask=half < HALF)
    tl.store(kept + RANK + HALF + half, as_kept(high_end, inverse, kind), mask=half < HALF)

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
    """As `Kernels.latent_inputs`, of a cache of q's dtype or of FP8."""
    tokens = len(latents)
    if cache.dtype not in (q.dtype, FP8) or not (
        cache.is_contiguous() and out.is_contiguous() and latents.stride(1) == 1
    ):
        raise ValueError(f"a cache of {cache.dtype} for {q.dtype}, or one that is not contiguous")
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
