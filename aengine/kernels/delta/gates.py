"""Pieces that the kernels of a delta net share."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def only_if(condition, inside):
    """A mask, or none of it. (Of a block and a number the interpreter makes integers.)"""
    return (inside & condition) != 0


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def log_decay(a_log, a, dt_bias):
    """g = -exp(a_log) * softplus(a + dt_bias), of float32."""
    x = a + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gated_norm(o, z, norm, eps, axis: tl.constexpr, VALUE_DIM: tl.constexpr):
    """norm * rms_norm(o) * silu(z), o and z float32; rounded before the weight, as the models were trained."""
    scale = tl.math.rsqrt(tl.sum(o * o, axis=axis, keep_dims=True) / VALUE_DIM + eps)
    normed = ((o * scale).to(norm.dtype).to(tl.float32) * norm.to(tl.float32)).to(norm.dtype)
    return normed.to(tl.float32) * silu(z)
