"""RMSNorm, and SiLU(gate) * up: one pass over memory each."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.norm_add import norm_add
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [tokens, SIZE]
    weight_ptr,  # [SIZE]
    out_ptr,  # [tokens, SIZE]
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
    dtype = out_ptr.dtype.element_ty
    wide = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    # Rounded to the model's dtype before the weight, as the reference does.
    tl.store(out_ptr + offsets, ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, hidden] -> the same shape, normalised over `hidden` in float32."""
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    block = power_of_two(size)
    overlap = launch_for(x.device).overlap
    if x.numel():
        _rms_norm_kernel[(x.numel() // size,)](
            x, weight, out, eps, SIZE=size, BLOCK=block, OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)), launch_pdl=overlap,
        )  # fmt: skip
    return out


@dataclass(slots=True)
class TritonNorm:
    """An RMS norm as one kernel, or as a part of the product behind it."""

    weight: Tensor  # [width]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return norm_add(x, self.weight, self.eps, residual)


@keep_variants
@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [tokens, 2 * SIZE]
    out_ptr,  # [tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [tokens, 2 * inter] -> SiLU of the first half times the second, [tokens, inter]."""
    gate_up = gate_up.contiguous()
    tokens, double = gate_up.shape
    size = double // 2
    out = gate_up.new_empty(tokens, size)
    block = min(2048, power_of_two(size))
    overlap = launch_for(gate_up.device).overlap
    if tokens:
        _silu_mul_kernel[(tokens, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, OVERLAP=overlap, num_warps=max(1, block // 512), launch_pdl=overlap
        )
    return out
