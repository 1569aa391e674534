"""Plans the blocks of tokens in which the chunks of a step are computed. Once a step, for all layers."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.launch import power_of_two
from aengine.kernels.recurrent.state import BLOCK, StateBatch
from aengine.kernels.variants import keep_variants


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a chunk's tokens, which begin at positions that are multiples of BLOCK.

    A chunk's first block may begin before the chunk, and its last one may end after it. There are enough
    entries for any division of the tokens into chunks.
    """

    chunks: Tensor  # [most] int32: the chunk of each block; -1: unused
    tokens: Tensor  # [most] int32: each block's first token
    starts: Tensor  # [chunks + 1] int32: the first block of each chunk, and the number of blocks

    @property
    def most(self) -> int:
        return len(self.chunks)

    @classmethod
    def from_batch(cls, batch: StateBatch) -> Blocks:
        """Plan the blocks on the device, without a host sync."""
        tokens, chunks = len(batch.positions), batch.num_chunks
        # A chunk of n tokens touches at most min(n, (n + 126) / 64) blocks.
        most = max(1, min(tokens, (tokens + 2 * (BLOCK - 1) * chunks) // BLOCK))
        whole = torch.empty(2 * most + chunks + 1, dtype=torch.int32, device=batch.starts.device)
        blocks = cls(*whole.split((most, most, chunks + 1)))
        _blocks_kernel[(chunks + 1,)](
            batch.starts, batch.positions, blocks.chunks, blocks.tokens, blocks.starts, tokens, chunks, most,
            CHUNKS=max(128, power_of_two(chunks)), BLOCK=BLOCK, AT_ONCE=256, num_warps=4,
        )  # fmt: skip
        return blocks


@keep_variants
@triton.jit(
    do_not_specialize=["tokens", "chunks", "most"],
    do_not_specialize_on_alignment=["starts_ptr", "positions_ptr", "of_ptr", "first_ptr", "begin_ptr"],
)
def _blocks_kernel(
    starts_ptr,  # [chunks + 1]
    positions_ptr,  # [tokens]
    of_ptr,  # [most]
    first_ptr,  # [most]
    begin_ptr,  # [chunks + 1]
    tokens,
    chunks,
    most,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    own = tl.program_id(0)  # a chunk; the last program handles the unused blocks
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    start = tl.load(starts_ptr + chunk, mask=inside, other=0)
    end = tl.load(starts_ptr + chunk + 1, mask=inside, other=0)
    filled = inside & (start < end)
    # The tokens of a chunk's first block that precede it.
    before = (tl.load(positions_ptr + start, mask=filled, other=0) % BLOCK).to(tl.int32)
    count = tl.where(filled, (before + end - start + BLOCK - 1) // BLOCK, 0)
    begin = tl.sum(tl.where(chunk < own, count, 0), axis=0)
    number = tl.sum(tl.where(chunk == own, count, 0), axis=0)
    first = tl.sum(tl.where(chunk == own, start - before, 0), axis=0)
    tl.store(begin_ptr + own, begin)
    if own == chunks:
        number = most - begin
    for at in range(0, number, AT_ONCE):
        block = at + tl.arange(0, AT_ONCE)
        tl.store(of_ptr + begin + block, tl.where(own == chunks, -1, own) + block * 0, mask=block < number)
        tl.store(first_ptr + begin + block, first + block * BLOCK, mask=block < number)
