"""A residual and the RMS norm of what is added to it: one pass over memory."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _norm_add_kernel(
    x_ptr,  # [tokens, SIZE]
    weight_ptr,  # [SIZE]
    residual_ptr,  # [tokens, SIZE], where the sum goes
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    if OVERLAP:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    dtype = residual_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    # Rounded as a norm and a sum on their own would be.
    normed = ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    tl.store(residual_ptr + offsets, (residual + normed).to(dtype), mask=inside)


def norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """x, residual [tokens, hidden] -> residual, to which x is added, normalised over `hidden` in float32."""
    x = x.contiguous()
    size = x.shape[-1]
    block = power_of_two(size)
    overlap = launch_for(x.device).overlap
    if x.numel():
        _norm_add_kernel[(x.numel() // size,)](
            x, weight, residual, eps, SIZE=size, BLOCK=block, OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)), launch_pdl=overlap,
        )  # fmt: skip
    return residual
