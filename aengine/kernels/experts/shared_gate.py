"""SiLU(gate) * up of a shared expert, times the sigmoid of the token's product with a row, in one launch."""
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
def _gated_silu_mul_kernel(
    gate_up_ptr,  # [tokens, 2 * SIZE]
    h_ptr,  # [tokens, K]
    row_ptr,  # [K]
    out_ptr,  # [tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # K, padded to a power of two
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    k = tl.arange(0, WIDTH)
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.load(row_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    h = tl.load(h_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + token * (2 * SIZE) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(tl.sum(h * row))
    out = gate * tl.sigmoid(gate) * up * factor
    tl.store(out_ptr + token * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_silu_mul(gate_up: Tensor, h: Tensor, row: Tensor) -> Tensor:
    """gate_up [tokens, 2 * inter], h [tokens, hidden], row [1, hidden] -> [tokens, inter]; computed in float32."""
    gate_up, h, row = gate_up.contiguous(), h.contiguous(), row.contiguous()
    tokens, double = gate_up.shape
    size, hidden = double // 2, h.shape[1]
    out = gate_up.new_empty(tokens, size)
    block = min(2048, power_of_two(size))
    width = power_of_two(hidden)
    overlap = launch_for(gate_up.device).overlap
    if tokens:
        _gated_silu_mul_kernel[(tokens, triton.cdiv(size, block))](
            gate_up, h, row, out, SIZE=size, BLOCK=block, K=hidden, WIDTH=width, OVERLAP=overlap,
            num_warps=min(8, max(1, max(block, width) // 512)), launch_pdl=overlap,
        )  # fmt: skip
    return out
