"""The ends of an expert's two products: biases, the activation of `ExpertRule`, and stores."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.elementwise import gelu


@triton.jit
def activated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """SiLU(gate) * up, or GELU(gate) * up. NaN stays NaN.

    LIMIT > 0: clamp both to their limits, use a steeper sigmoid, and add 1 to up.
    """
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
def squared_relu(x):
    """The square of ReLU. NaN stays NaN."""
    x = tl.where(x < 0, 0.0, x)
    return x * x


@triton.jit
def gate_up_biases(biases_ptr, expert, n, N: tl.constexpr):
    """Load gate's and up's biases of [E, 2 * N], gate's first, in float32 and in the shape of n."""
    place = biases_ptr + expert * (2 * N) + n
    gate = tl.load(place, mask=n < N, other=0.0).to(tl.float32)
    return gate, tl.load(place + N, mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def row_biases(biases_ptr, expert, n, N: tl.constexpr):
    """Load biases of [E, N], of down or of up alone, in float32, in the shape to which expert and n broadcast."""
    return tl.load(biases_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)


@triton.jit
def activated_columns(
    gate, up, biases_ptr, expert, n, N: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    GELU: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """Add their biases to columns n of one row, and activate them. Without GATED only `up` is used."""
    if GATED:
        if BIASES:
            of_gate, of_up = gate_up_biases(biases_ptr, expert, n, N)
            gate, up = gate + of_gate, up + of_up
        result = activated(gate, up, ALPHA, LIMIT, GELU)
    else:
        if BIASES:
            up += row_biases(biases_ptr, expert, n, N)
        result = squared_relu(up)
    return result


@triton.jit
def store_pairs(
    product, out_ptr, biases_ptr, expert, rows, used, n, N: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, UNFUSED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    GELU: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """Store a tile's product of one expert: [BLOCK_N, M] if WEIGHT_FIRST, else [M, BLOCK_N].

    rows [M]: their places in `out`. used [M]: the rows that exist. n [BLOCK_N]: columns of `out`, of N. FIRST: the
    product is activated. GATED: it is twice as wide, gate first. UNFUSED: it is stored as it is, gate first.
    """
    M: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = n.shape[0]
    across: tl.constexpr = 0 if WEIGHT_FIRST else 1  # the axis of rows, which biases do not have
    along: tl.constexpr = 1 - across
    WIDTH: tl.constexpr = 2 * N if GATED and UNFUSED else N
    out = out_ptr + tl.expand_dims(rows.to(tl.int64), across) * WIDTH + tl.expand_dims(n, along)
    inside = tl.expand_dims(used, across) & tl.expand_dims(n < N, along)
    if GATED:
        if WEIGHT_FIRST:
            gate, up = tl.split(tl.permute(tl.reshape(product, (2, BLOCK_N, M)), (1, 2, 0)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(product, (M, 2, BLOCK_N)), (0, 2, 1)))
        if BIASES:
            of_gate, of_up = gate_up_biases(biases_ptr, expert, n, N)
            gate, up = gate + tl.expand_dims(of_gate, along), up + tl.expand_dims(of_up, along)
        if UNFUSED:
            tl.store(out + N, up.to(out_ptr.dtype.element_ty), mask=inside)
            product = gate
        else:
            product = activated(gate, up, ALPHA, LIMIT, GELU)
    else:
        if BIASES:
            product += tl.expand_dims(row_biases(biases_ptr, expert, n, N), along)
        if FIRST and not UNFUSED:
            product = squared_relu(product)
    tl.store(out, product.to(out_ptr.dtype.element_ty), mask=inside)
