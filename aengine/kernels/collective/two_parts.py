"""The sum of two parts that lie on one device, on top of a residual, with its norm: one pass over memory."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.launch import power_of_two
from aengine.kernels.linear.base import Norm
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _two_parts_kernel(
    first_ptr,  # [tokens, SIZE]
    second_ptr,  # the same
    residual_ptr,  # the same, which the sum replaces
    weight_ptr,  # [SIZE], or None without a norm
    normed_ptr,  # [tokens, SIZE], or None
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(first_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(second_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(dtype)
    tl.store(residual_ptr + offsets, rounded, mask=inside)
    if weight_ptr is not None:  # as norms.py does it
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        wide = rounded.to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        tl.store(normed_ptr + offsets, ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


def sum_two_parts(
    first: Tensor, second: Tensor, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None
) -> None:
    """residual += first + second, rounded once, and normed = norm(residual): each [tokens, hidden], contiguous, all of
    one type.
    """
    tokens, size = residual.shape
    block = power_of_two(size)
    if tokens:
        _two_parts_kernel[(tokens,)](
            first, second, residual, None if norm is None else norm.weight, normed, 0.0 if norm is None else norm.eps,
            SIZE=size, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
