"""What heads have attended to, times the sigmoids of their gates: one pass over memory."""
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
def _output_gate_kernel(
    x_ptr,  # [tokens, SIZE], and the result
    gates_ptr,  # [tokens, heads, DIM], of these strides
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gates = gates_ptr + token * TOKEN_STRIDE + columns // DIM * HEAD_STRIDE + columns % DIM
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.sigmoid(tl.load(gates, mask=inside, other=0.0).to(tl.float32))
    x = tl.load(x_ptr + token * SIZE + columns, mask=inside, other=0.0)
    # The sigmoid is rounded to the model's dtype, as the reference does.
    result = x.to(tl.float32) * gate.to(x.dtype).to(tl.float32)
    tl.store(x_ptr + token * SIZE + columns, result.to(x.dtype), mask=inside)


def gate_output(x: Tensor, gates: Tensor) -> Tensor:
    """x [tokens, heads * dim], in its place where it is contiguous, times the sigmoids of gates [tokens, heads, dim],
    whose last axis is contiguous.
    """
    x = x.contiguous()
    tokens, size = x.shape
    block = min(2048, power_of_two(size))
    overlap = launch_for(x.device).overlap
    if tokens:
        _output_gate_kernel[(tokens, triton.cdiv(size, block))](
            x, gates, TOKEN_STRIDE=gates.stride(0), HEAD_STRIDE=gates.stride(1), SIZE=size, DIM=gates.shape[2],
            BLOCK=block, OVERLAP=overlap, num_warps=max(1, block // 512), launch_pdl=overlap,
        )  # fmt: skip
    return x
