"""Pools prompts for embeddings and scores: takes or sums hidden states, or runs a head over them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.model.decoder import Decoder
from aengine.runtime.step.rows import Rows
from aengine.step_plan import StepPlan


@dataclass(slots=True)
class ChunkPools:
    """Results of pooled prefill chunks, float32. None: the step has no chunk of this kind."""

    # [n, ...] for n chunks of the kind, in the plan's order.
    hidden: Tensor | None = None  # [n, hidden], for the kinds `last` and `mean`; a mean's tokens are only summed
    classes: Tensor | None = None  # [n, labels]
    tokens: Tensor | None = None  # [n, token ids of a chunk]

    def mapped(self, to_host: Callable[[Tensor], Tensor]) -> ChunkPools:
        """Return a copy with `to_host` applied to every tensor."""
        parts = (self.hidden, self.classes, self.tokens)
        return ChunkPools(*(None if part is None else to_host(part) for part in parts))


def pooled_tokens(plan: StepPlan) -> list[int]:
    """Return the pooled tokens of the step, by chunk: the last one, or all of them for a mean."""
    tokens: list[int] = []
    ends = itertools.accumulate((len(chunk.token_ids) for chunk in plan.prefill), initial=plan.decode_tokens)
    for chunk, (start, end) in zip(plan.prefill, itertools.pairwise(ends), strict=True):
        if chunk.pool is not None:
            tokens += range(start if chunk.pool.needs_all_tokens else end - 1, end)
    return tokens


def pool_chunks(plan: StepPlan, hidden: Tensor, decoder: Decoder, rows: Rows) -> ChunkPools:
    """Pool the hidden states of the `pooled_tokens`, [n, hidden]. No host sync."""
    at = 0
    vectors: list[Tensor] = []  # [1, hidden] float32 each
    classified: list[Tensor] = []  # [1, hidden] each
    scored: list[Tensor] = []  # [1, hidden] each
    scored_rows: list[int] = []
    token_ids: list[int] = []
    for chunk in plan.prefill:
        if (pool := chunk.pool) is None:
            continue
        count = len(chunk.token_ids) if pool.needs_all_tokens else 1
        own = hidden[at : at + count]
        at += count
        match pool.kind:
            case "last" | "mean":
                vectors.append(own.sum(0, keepdim=True, dtype=torch.float32))
            case "classes":
                classified.append(own)
            case "tokens":
                scored.append(own)
                scored_rows.append(chunk.row)
                token_ids += pool.token_ids
    pools = ChunkPools()
    if vectors:
        pools.hidden = torch.cat(vectors)
    if classified:
        pools.classes = decoder.classes(torch.cat(classified)).float()
    if scored:
        ids = rows.upload(token_ids).view(len(scored), -1)
        adapters = rows.adapters_of(scored_rows) if decoder.adapts_logits else None
        if adapters is not None:
            adapters = adapters[rows.upload(scored_rows)]
        pools.tokens = decoder.logits(torch.cat(scored), adapters).gather(1, ids).float()
    return pools


def read_pools(pools: ChunkPools | None, plan: StepPlan) -> Sequence[array[float] | None]:
    """Return the numbers of each pooled chunk as the scheduler needs them, or None if some are not finite."""
    if pools is None:
        return ()
    of_kind = {
        "last": (vectors := _rows(pools.hidden)),
        "mean": vectors,
        "classes": _rows(pools.classes),
        "tokens": _rows(pools.tokens),
    }
    return [_finite(next(of_kind[chunk.pool.kind])) for chunk in plan.prefill if chunk.pool is not None]


def _rows(tensor: Tensor | None) -> Iterator[NDArray[np.float32]]:
    return iter(() if tensor is None else tensor.numpy(force=True))


def _finite(numbers: NDArray[np.float32]) -> array[float] | None:
    return array("f", numbers.tobytes()) if np.isfinite(numbers).all() else None
