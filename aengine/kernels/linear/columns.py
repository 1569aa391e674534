"""A row times rows of a weight by plain multiply-adds, in few instructions. Kernels for one row of inputs use it.

Two neighbouring numbers in bfloat16 are loaded as one word. A shift or a mask then widens each; Triton would take two
or three instructions. Two numbers of a norm's weight in float32 are a word of 64 bits. A thread has eight neighbouring
columns, so that it adds these up before threads exchange sums.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR = tl.constexpr(8)  # columns of a thread


def in_words(x: Tensor, weight: Tensor) -> bool:
    """Return whether x [..., k] and weight [..., k] are read as words of two columns."""
    return x.dtype == weight.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0


@triton.jit
def load_columns(rows, at, WIDTH: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr):
    """Load WIDTH columns from `at` on, of pointers to rows [..., 1]. WHOLE: they end within K; otherwise zeros
    follow.
    """
    if WORDS:
        word: tl.constexpr = tl.int64 if rows.dtype.element_ty == tl.float32 else tl.int32
        k = tl.arange(0, WIDTH // 2)
        inside = k < (K - at) // 2
        rows = rows.to(tl.pointer_type(word), bitcast=True) + at // 2
    else:
        k = tl.max_contiguous(tl.arange(0, WIDTH), VECTOR)  # numbers of one byte are loaded in the same shape as x
        inside = k < K - at
        rows = rows + at
    for _ in tl.static_range(len(rows.shape) - 1):
        k = k[None]
        inside = inside[None]
    return tl.load(rows + k) if WHOLE else tl.load(rows + k, mask=inside, other=0 if WORDS else 0.0)


@triton.jit
def evens(x):
    """Return the lower numbers of words, or all numbers if they are no words, in float32."""
    if x.dtype == tl.int64:
        return x.to(tl.int32).to(tl.float32, bitcast=True)
    return (x << 16).to(tl.float32, bitcast=True) if x.dtype == tl.int32 else x.to(tl.float32)


@triton.jit
def odds(x):
    """Return the upper numbers of words, or zeros if they are no words, in float32."""
    if x.dtype == tl.int64:
        return (x >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return (x & -65536).to(tl.float32, bitcast=True) if x.dtype == tl.int32 else tl.zeros(x.shape, tl.float32)


@triton.jit
def products(w, x_evens, x_odds, PARTS: tl.constexpr):
    """Multiply columns of a weight by those of x: [..., PARTS], neighbours added up."""
    total = fold(evens(w) * x_evens, PARTS)
    if w.dtype == tl.int32:
        total += fold(odds(w) * x_odds, PARTS)
    return total


@triton.jit
def fold(x, PARTS: tl.constexpr):
    """Add up neighbours: [..., columns] -> [..., PARTS]."""
    if len(x.shape) == 2:
        folded = tl.reshape(x, [x.shape[0], PARTS, x.shape[1] // PARTS])
    else:
        folded = tl.reshape(x, [x.shape[0], x.shape[1], PARTS, x.shape[2] // PARTS])
    return tl.sum(folded, axis=len(x.shape))
