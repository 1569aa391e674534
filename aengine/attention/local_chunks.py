"""Chunked attention: positions are cut into chunks of equal length, and a token sees only those of its own chunk.

Each chunk that has queries becomes a sequence of its own. Its pages begin at the chunk's first page, and its tokens
attend causally. So the kernels of causal attention compute it, and layers keep their pages as with a window.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch


def cut_into_chunks(batch: AttentionBatch, size: int | None, page_size: int) -> AttentionBatch:
    """Return the step for layers with chunks of `size` positions, a multiple of `page_size`. None: they have no chunks.

    A prefill chunk becomes as many sequences as it may touch chunks of positions. Those that it does not touch have no
    tokens. All layers share the result, which is planned once per step. Needs no host sync.

    Raises: ValueError if decodes have drafts, or pages do not divide chunks.
    """
    if size is None:
        return batch
    if size % page_size:
        raise ValueError(f"page_size: is {page_size}, which does not divide chunks of {size} positions")
    if batch.decode_queries != 1:
        raise ValueError("chunked attention takes no drafts; set speculation to off")
    return batch.plan(AttentionBatch, lambda: _cut(batch, size, page_size), size)


def _cut(batch: AttentionBatch, size: int, page_size: int) -> AttentionBatch:
    decodes, queries, contexts = batch.num_decodes, batch.query_lens, batch.context_lens
    if queries:
        spans = zip(contexts[decodes:], queries[decodes:])
        parts = max(((end - 1) // size - max(end - count, 0) // size + 1 for end, count in spans), default=1)
    else:  # a captured step: its chunks may begin anywhere
        parts = 2 + (len(batch.slots) - 1) // size
    seqs = len(batch.seq_lens)
    rows, part = _numbered(decodes, seqs, parts, batch.seq_lens.device)
    ends = batch.seq_lens.long()
    counts = batch.query_starts.diff().long()
    firsts, lens, skipped = _lay_out(ends, counts, rows, part, size)
    width = batch.page_table.shape[1]
    pages = (firsts // page_size).unsqueeze(1) + torch.arange(size // page_size, device=firsts.device)
    starts = batch.query_starts[:-1].index_select(0, rows) + skipped
    made = replace(
        batch,
        page_table=batch.page_table.index_select(0, rows).gather(1, pages.clamp_(max=width - 1)),
        seq_lens=lens.to(torch.int32),
        query_starts=torch.cat((starts, batch.query_starts[-1:])).to(torch.int32),
        shared=None,
        sliding=None,
        plans={},
    )
    if queries:  # the same for the host's lengths
        rows, part = _numbered(decodes, seqs, parts, torch.device("cpu"))
        known = torch.tensor(queries)
        _, lens, skipped = _lay_out(torch.tensor(contexts), known, rows, part, size)
        # A sequence's tokens end where those of its next part begin.
        after = torch.cat((skipped[1:], skipped[:1])).where(torch.cat((part[1:], part[:1])) > 0, known[rows])
        made.query_lens = (after - skipped).tolist()
        # A decode's length is an upper bound, beyond which its chunk may not be the last one.
        made.context_lens = [min(one, size) for one in contexts[:decodes]] + lens[decodes:].tolist()
    return made


def _numbered(decodes: int, seqs: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row of each new sequence in the step, and its number among the parts of this row, both int64.

    A decode has one part, a prefill chunk has `parts`.
    """
    row = torch.arange(decodes, seqs, device=device).unsqueeze(1).expand(-1, parts).flatten()
    part = torch.arange(parts, device=device).expand(seqs - decodes, -1).flatten()
    return torch.cat((torch.arange(decodes, device=device), row)), torch.cat((part.new_zeros(decodes), part))


def _lay_out(ends: Tensor, counts: Tensor, rows: Tensor, part: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first position of each new sequence, its length, and the row's query tokens before it, all int64.

    ends, counts [rows]: the context and the query tokens of each row of the step.
    """
    begins = (ends - counts).clamp_(min=0)  # padding may have more tokens than its context
    firsts = (begins // size).index_select(0, rows) + part
    firsts *= size
    ends, begins, counts = (one.index_select(0, rows) for one in (ends, begins, counts))
    lens = (torch.minimum(ends, firsts + size) - firsts).clamp_(min=0)
    # Unused decodes of a captured step keep their length of -1.
    return firsts, torch.minimum(lens, ends), torch.minimum((firsts - begins).clamp_(min=0), counts)
