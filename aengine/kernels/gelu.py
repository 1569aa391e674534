"""GELU(gate) * up, by its approximation with a hyperbolic tangent: one pass over memory."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@triton.jit
def gelu(x):
    """x float32."""
    # (1 + tanh(a)) / 2 is the sigmoid of 2 a, and 2 sqrt(2 / pi) is 1.5957...
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@keep_variants
@triton.jit
def _gelu_mul_kernel(
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
    activated = gelu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [tokens, 2 * inter] -> GELU of the first half times the second, [tokens, inter]."""
    gate_up = gate_up.contiguous()
    tokens, double = gate_up.shape
    size = double // 2
    out = gate_up.new_empty(tokens, size)
    block = min(2048, power_of_two(size))
    overlap = launch_for(gate_up.device).overlap
    if tokens:
        _gelu_mul_kernel[(tokens, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, OVERLAP=overlap, num_warps=max(1, block // 512), launch_pdl=overlap
        )
    return out
