"""Repetition, presence and frequency penalties on the logits of tokens that were seen, in place, in one pass.

What is read of every token is its cell of `aengine.sampling.penalties.TokenCounts`; logits are read and written only
where that is not zero, which they are for a few hundred tokens of a row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.variants import keep_variants

BLOCK = 2048


@keep_variants
@triton.jit(do_not_specialize=["parameter_stride"])
def _penalize_kernel(
    logits_ptr,  # [all draws, VOCAB] float32
    draws_ptr,  # [n] int64
    row_index_ptr,  # [all draws] int64
    cells_ptr,  # [rows, VOCAB] int32
    repetition_ptr,  # [all draws] float32
    presence_ptr,  # [all draws] float32
    frequency_ptr,  # [all draws] float32
    parameter_stride,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    draw = tl.load(draws_ptr + tl.program_id(0) // PIECES)
    row = tl.load(row_index_ptr + draw)
    ids = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    cells = tl.load(cells_ptr + row * VOCAB + ids, mask=ids < VOCAB, other=0)
    seen = cells != 0
    if tl.max(cells, axis=0) > 0:  # else nothing of this block was
        repetition = tl.load(repetition_ptr + draw * parameter_stride)
        presence = tl.load(presence_ptr + draw * parameter_stride)
        frequency = tl.load(frequency_ptr + draw * parameter_stride)
        at = logits_ptr + draw * VOCAB + ids
        x = tl.load(at, mask=seen, other=0.0)
        x = tl.where(x < 0, x * repetition, tl.div_rn(x, tl.zeros_like(x) + repetition))
        x -= (cells >> 1).to(tl.float32) * frequency
        x -= tl.where(cells > 1, presence, 0.0)
        tl.store(at, x, mask=seen)


def penalize_seen(
    logits: Tensor,
    draws: Tensor,
    row_index: Tensor,
    cells: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Change, in place, the logits of these draws, bit for bit as `aengine.sampling.penalties.penalize` would.

    logits [all draws, vocab] float32, contiguous; draws [n] int64, each once; row_index [all draws] int64; cells
    [rows, vocab] int32, contiguous: twice the number of times in the output, and one if in the prompt. repetition,
    presence, frequency [all draws] float32, all of one stride.
    """
    vocab = logits.shape[1]
    pieces = triton.cdiv(vocab, BLOCK)
    if len(draws):
        _penalize_kernel[(len(draws) * pieces,)](
            logits, draws, row_index, cells, repetition, presence, frequency, repetition.stride(0),
            VOCAB=vocab, PIECES=pieces, BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=False,  # a product and a difference, rounded one after the other, as torch does
        )  # fmt: skip
