"""Groups the draws of a batch by the stages they need, as index tensors on the device.

Groups depend only on the rows, so the host reuses them while the same rows draw. Then decoding copies no indices to
the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.parameters import (
    ALLOWED,
    BANNED,
    BIAS,
    FILTER,
    GRAMMAR,
    LOGPROBS,
    MIN_P,
    MIN_TOKENS,
    NOISE,
    PENALTY,
    RowParameters,
)
from aengine.sampling.upload import upload

# The most numbers in a temporary tensor of a stage: 32 MiB in float32.
_BLOCK_CELLS = 1 << 23


@dataclass(slots=True)
class Groups:
    """Indices into the batch's draws, as int64 tensors on the device. A list holds one group, divided into blocks.

    A block that is None stands for the whole batch, which needs no index. Fused kernels take undivided groups, so lists
    of their stages are empty.
    """

    rows: list[int]
    any_filter: bool  # whether any draw has top_k, top_p or min_p
    greedy: bool  # whether any draw is an argmax
    plain: list[Tensor | None]
    plain_min_p: bool  # whether any plain draw has a min_p
    filtered: list[Tensor | None]
    width: int  # the largest top_k of filtered draws
    penalized: Tensor | None
    penalized_blocks: list[Tensor | None]
    logprobs: Tensor | None
    logprobs_blocks: list[Tensor | None]
    top_logprobs: int  # the most candidates that any draw requests
    biased: Tensor | None
    min_tokens: Tensor | None
    banned: Tensor | None
    allowed: list[Tensor | None]
    grammar: list[Tensor | None]

    @property
    def adjusts(self) -> bool:
        """Whether a stage other than grammars changes logits."""
        indices = (self.biased, self.penalized, self.min_tokens, self.banned)
        return bool(self.allowed) or any(index is not None for index in indices)


def group(rows: list[int], parameters: RowParameters, vocab_size: int, device: torch.device, *, fused: bool) -> Groups:
    """Group the draws of the given rows by stage. fused: one kernel draws for all rows, so draws are not grouped."""
    needs = [parameters.needs[row] for row in rows]

    def having(bit: int) -> list[int]:
        return [i for i, need in enumerate(needs) if need & bit]

    def on_device(draws: list[int]) -> Tensor | None:
        return upload(np.array(draws, dtype=np.int64), device) if draws else None

    def blocks(draws: list[int]) -> list[Tensor | None]:
        size = max(1, _BLOCK_CELLS // vocab_size)
        if len(draws) == len(rows) <= size:
            return [None] if draws else []
        index = on_device(draws)
        return [] if index is None else [index[i : i + size] for i in range(0, len(draws), size)]

    plain = [] if fused else [i for i, need in enumerate(needs) if need & NOISE and not need & FILTER]
    filtered = [] if fused else having(FILTER)
    penalized, logprobs = having(PENALTY), having(LOGPROBS)
    return Groups(
        rows=list(rows),
        any_filter=any(need & (FILTER | MIN_P) for need in needs),
        greedy=len(plain) + len(filtered) < len(rows),
        plain=blocks(plain),
        plain_min_p=any(needs[i] & MIN_P for i in plain),
        filtered=blocks(filtered),
        width=max((parameters.top_k[rows[i]] for i in filtered), default=0),
        penalized=on_device(penalized),
        penalized_blocks=[] if fused else blocks(penalized),
        logprobs=on_device(logprobs),
        logprobs_blocks=[] if fused else blocks(logprobs),
        top_logprobs=min(vocab_size, max((parameters.logprobs[rows[i]] for i in logprobs), default=0)),
        biased=on_device(having(BIAS)),
        min_tokens=on_device(having(MIN_TOKENS)),
        banned=on_device(having(BANNED)),
        allowed=blocks(having(ALLOWED)),
        grammar=blocks(having(GRAMMAR)),
    )
