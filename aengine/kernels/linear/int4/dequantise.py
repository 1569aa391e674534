"""Words of 4-bit codes, written out dense."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.int4.block import load_scales, load_words, unpack
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def dequantise_kernel(
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    out_ptr,  # [N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MXFP4: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) % BLOCKS
    n = tl.program_id(0) // BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, N - 1)
    c = tl.arange(0, 32)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    words = load_words(words_ptr, tl.program_id(0) // BLOCKS, block, N, BLOCKS, BLOCK_N)
    scales = load_scales(scales_ptr, block, inside_n, MXFP4, GROUP, N)
    if OVERLAP:
        gdc_wait()
    out = out_ptr + n.to(tl.int64)[:, None] * K
    inside = (n < N)[:, None]
    w0, w1, w2, w3 = unpack(words, scales, tl.zeros([1], out_ptr.dtype.element_ty), MXFP4, True, ASM, BASE, LIFT)
    _store_quarter(out, w0, block * 128 + c, inside, K)
    _store_quarter(out, w1, block * 128 + 32 + c, inside, K)
    _store_quarter(out, w2, block * 128 + 64 + c, inside, K)
    _store_quarter(out, w3, block * 128 + 96 + c, inside, K)


@triton.jit
def _store_quarter(out, quarter, k, inside, K: tl.constexpr):
    tl.store(out + k, quarter, mask=inside & (k < K) if K % 128 else inside)
