"""What lies between an expert's two products, as `ExpertRule` says it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.elementwise import gelu


@triton.jit
def activated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """SiLU(gate) * up, or GELU(gate) * up; LIMIT > 0: SiLU of both within their limits, with a steeper sigmoid, and
    up + 1. NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
        result = gate * tl.sigmoid(ALPHA * gate) * up
    elif GELU:
        result = gelu(gate) * up
    else:
        result = gate * tl.sigmoid(gate) * up
    return result


@triton.jit
def gate_up_biases(biases_ptr, expert, n, N: tl.constexpr):
    """biases [E, 2 * N], gate's first -> those of gate and of up, float32, in the shape of n."""
    place = biases_ptr + expert * (2 * N) + n
    gate = tl.load(place, mask=n < N, other=0.0).to(tl.float32)
    return gate, tl.load(place + N, mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def down_biases(biases_ptr, expert, n, N: tl.constexpr):
    """biases [E, N] -> float32, in the shape that expert and n have together."""
    return tl.load(biases_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)
