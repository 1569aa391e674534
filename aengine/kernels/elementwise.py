"""Kernels that pass over memory once: RMS norms, gated activations, rotations, the gates of attention's output.

Results are rounded to the model's dtype at the same steps as in the torch reference.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gelu(x):
    """GELU by its tanh approximation; x is float32."""
    # (1 + tanh(a)) / 2 is the sigmoid of 2 a, and 2 sqrt(2 / pi) is 1.5957...
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)); float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_decay(a_log, a, dt_bias):
    """Return a delta net's log of the decay, -exp(a_log) * softplus(a + dt_bias); all float32."""
    return -tl.exp(a_log) * softplus(a + dt_bias)


@triton.jit
def gated_norm(o, z, norm, eps, axis: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return norm * rms_norm(o) * silu(z) for float32 o and z. Rounds before the weight, like the reference."""
    scale = tl.math.rsqrt(tl.sum(o * o, axis=axis, keep_dims=True) / VALUE_DIM + eps)
    normed = ((o * scale).to(norm.dtype).to(tl.float32) * norm.to(tl.float32)).to(norm.dtype)
    return normed.to(tl.float32) * silu(z)


@triton.jit
def only_if(condition, inside):
    """Return the mask `inside`, or an empty one. Interpreted, mask & number is an integer, so it is compared."""
    return (inside & condition) != 0


@keep_variants
@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [tokens, SIZE]
    weight_ptr,  # [SIZE]
    out_ptr,  # [tokens, SIZE]; with ADD the residual, which the sum replaces
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
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
    if ADD:
        residual = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    out = out_ptr + offsets
    result = ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    if ADD:
        result = (residual + result.to(tl.float32)).to(dtype)
    tl.store(out, result, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x [tokens, hidden] over `hidden`, computed in float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, weight, eps, out, add=False)
    return out


def norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Add the RMS norm of x to the residual in place, both [tokens, hidden], and return the residual."""
    _launch_norm(x.contiguous(), weight, eps, residual, add=True)
    return residual


def _launch_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, add: bool) -> None:
    size = x.shape[-1]
    block = power_of_two(size)
    overlap = launch_for(x.device).overlap
    if x.numel():
        _rms_norm_kernel[(x.numel() // size,)](
            x, weight, out, eps, SIZE=size, BLOCK=block, ADD=add, OVERLAP=overlap,
            num_warps=min(16, max(1, block // 512)), launch_pdl=overlap,
        )  # fmt: skip


@dataclass(slots=True)
class TritonNorm:
    """An RMS norm. It is a separate kernel, or is fused into the product that follows."""

    weight: Tensor  # [width]
    eps: float
    is_rms: ClassVar[bool] = True

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return norm_add(x, self.weight, self.eps, residual)


@keep_variants
@triton.jit
def _gate_kernel(
    gate_up_ptr,  # [tokens, 2 * SIZE]
    out_ptr,  # [tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
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
    activated = (gelu(wide) if GELU else silu(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) * up [tokens, inter] of gate_up [tokens, 2 * inter], gate first."""
    return _gate(gate_up, use_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return GELU(gate) * up [tokens, inter] of gate_up [tokens, 2 * inter], gate first."""
    return _gate(gate_up, use_gelu=True)


def _gate(gate_up: Tensor, use_gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    tokens, double = gate_up.shape
    size = double // 2
    out = gate_up.new_empty(tokens, size)
    block = min(2048, power_of_two(size))
    overlap = launch_for(gate_up.device).overlap
    if tokens:
        _gate_kernel[(tokens, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, GELU=use_gelu, OVERLAP=overlap, num_warps=max(1, block // 512),
            launch_pdl=overlap,
        )  # fmt: skip
    return out


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
    """Like silu_mul(), times sigmoid(h row^T) of each token: the gate of a shared expert. Computed in float32.

    h: [tokens, hidden]. row: [1, hidden].
    """
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


@keep_variants
@triton.jit
def _xielu_kernel(
    x_ptr,  # [tokens, SIZE]
    values_ptr,  # [4] float32
    out_ptr,  # [tokens, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    p = tl.load(values_ptr)
    n = tl.load(values_ptr + 1)
    b = tl.load(values_ptr + 2)
    e = tl.load(values_ptr + 3)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    negative = n * (tl.exp(tl.minimum(x, e)) - 1.0 - x)
    result = tl.where(x > 0, p * x * x, negative) + b * x
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)


def xielu(x: Tensor, values: Tensor) -> Tensor:
    """Return xIELU of x [tokens, width]. values: as in `Kernels.xielu`."""
    x = x.contiguous()
    tokens, size = x.shape
    out = torch.empty_like(x)
    block = min(2048, power_of_two(size))
    overlap = launch_for(x.device).overlap
    if tokens:
        _xielu_kernel[(tokens, triton.cdiv(size, block))](
            x, values, out, SIZE=size, BLOCK=block, OVERLAP=overlap, num_warps=max(1, block // 512),
            launch_pdl=overlap,
        )  # fmt: skip
    return out


@keep_variants
@triton.jit
def _output_gate_kernel(
    x_ptr,  # [tokens, SIZE]; the result replaces it
    gates_ptr,  # [tokens, heads, DIM]
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
    result = x.to(tl.float32) * gate.to(x.dtype).to(tl.float32)
    tl.store(x_ptr + token * SIZE + columns, result.to(x.dtype), mask=inside)


def gate_output(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply attention's output by the sigmoid of its gates, in place if x is contiguous.

    x, gates: as in `Kernels.gate_output`.
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


@keep_variants
@triton.jit
def _rotate_kernel(
    x_ptr,  # [tokens, heads, PIECES * 2 * HALF]; the result replaces it
    cos_ptr,  # [tokens, PIECES, HALF]
    sin_ptr,
    heads,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < heads * PIECES) & (columns < HALF)
    piece = row % PIECES
    angles = (token * PIECES + piece) * HALF + columns
    cos = tl.load(cos_ptr + angles, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=inside, other=0.0)
    places = x_ptr + token * TOKEN_STRIDE + row // PIECES * HEAD_STRIDE + piece * (2 * HALF) + columns
    first = tl.load(places, mask=inside, other=0.0)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = first.dtype
    first = first.to(tl.float32)
    tl.store(places, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(places + HALF, (second * cos + first * sin).to(dtype), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x in place, and return it. x, cos, sin: as in `Kernels.rotate`."""
    tokens, heads, _ = x.shape
    pieces, half = cos.shape[1:]
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, block = min(32, power_of_two(heads * pieces)), power_of_two(half)
    if tokens:
        _rotate_kernel[(tokens, triton.cdiv(heads * pieces, rows))](
            x, cos, sin, heads, TOKEN_STRIDE=x.stride(0), HEAD_STRIDE=x.stride(1), PIECES=pieces, HALF=half, ROWS=rows,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return x
