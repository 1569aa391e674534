"""Applies repetition, presence and frequency penalties to the logits of seen tokens, in place, in one pass.

The kernel reads every token's cell of `aengine.sampling.penalties.TokenCounts`. It reads and writes only logits whose
cell is not zero, a few hundred in a row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.variants import keep_variants

BLOCK = 2048


@keep_variants
@triton.jit(do_not_specialize=["parameter_stride"], do_not_specialize_on_alignment=["draws_ptr", "row_index_ptr"])
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
    if tl.max(cells, axis=0) > 0:  # else no token of this block was seen
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
    """Penalise logits in place, with the same bits as `aengine.sampling.penalties.penalize`.

    Args:
        logits: [all draws, vocab] float32, contiguous.
        draws: [n] int64, without repetitions.
        row_index: [all draws] int64.
        cells: [rows, vocab] int32, contiguous: twice the count in the output, plus one if in the prompt.
        repetition, presence, frequency: [all draws] float32, of one stride.
    """
    vocab = logits.shape[1]
    pieces = triton.cdiv(vocab, BLOCK)
    if len(draws):
        _penalize_kernel[(len(draws) * pieces,)](
            logits, draws, row_index, cells, repetition, presence, frequency, repetition.stride(0),
            VOCAB=vocab, PIECES=pieces, BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=False,  # round the product before the difference, like torch
        )  # fmt: skip
