"""The interface of step executors, a step's state after the forward pass, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.runtime.step.pooling import ChunkPools
from aengine.runtime.step.scoring import ChunkScores
from aengine.runtime.step.written import Written
from aengine.sampling.sampler import Draws
from aengine.step_plan import StepPlan


@dataclass(slots=True)
class Outcome:
    """A step's results, on the device or being copied to the host."""

    draws: Draws | None  # None: nothing draws, or a kernel has written all draws to host memory
    scores: Sequence[ChunkScores] = ()  # for chunks with `score_ids`
    sums: Tensor | None = None  # [tokens] float32, as `Decoder.forward` fills them; None without chunks
    pools: ChunkPools | None = None  # for chunks with a `pool`
    written: Written | None = None  # instead of `draws`


@dataclass(slots=True)
class HeadInputs:
    """What a draft head reads of a step."""

    token_ids: Tensor  # [tokens] int64
    wanted: Tensor | None  # [wanted] int64: the token of each draw, then others. None: every token draws, in order.
    positions: Tensor  # [tokens] int64, as `Decoder.forward` takes them
    batch: AttentionBatch
    states: Tensor  # [tokens, width]: the target's hidden states, as `Taps` name them; arbitrary for `tokens_only`


@dataclass(slots=True)
class TokenPass:
    """The hidden states of a step, and the rows that draw from them."""

    hidden: Tensor  # [tokens, hidden] if `wanted` is set; else [wanted, hidden]: tokens that draw, then pooled tokens
    wanted: Tensor | None  # [wanted] int64: indices into `hidden`; None: `hidden` has only the wanted tokens
    draw_rows: Tensor  # [draws] int64
    draw_positions: Tensor  # [draws] int64: the position of the drawn token in its sequence
    sums: Tensor | None  # [tokens] float32, as `Decoder.forward` fills them; None without chunks
    adapted: bool  # whether a token of the step has an adapter
    inputs: HeadInputs | None = None  # for a proposer that reads hidden states
    token_adapters: Tensor | None = None  # [tokens] int32, for scoring; None: no adapters, or a captured step


@dataclass(slots=True)
class Forwarded:
    """A step after its forward pass."""

    plan: StepPlan
    logits: Tensor | None  # [draws, vocab] in the model's dtype; None if nothing draws
    row_list: list[int]  # the row of each draw, `StepPlan.draw_rows`
    rows: Tensor  # [draws] int64: `row_list` on the device
    positions: Tensor  # [draws] int64: the position of the drawn token in its sequence
    scores: Sequence[ChunkScores] = ()  # as in `Outcome`
    sums: Tensor | None = None
    pools: ChunkPools | None = None
    sharded: bool = False  # with several ranks: the logits cover only this rank's part of the vocabulary
    inputs: HeadInputs | None = None  # for a proposer that reads hidden states
    ranks: Sequence[Forwarded] = ()  # of each rank, if there are several; the other fields are those of the first

    def outcome(self, draws: Draws | None) -> Outcome:
        """Return the step's results, including its draws."""
        return Outcome(draws, self.scores, self.sums, self.pools)


class Executor(Protocol):
    """Runs steps. `StepExecutor` runs them on one rank. Other executors wrap it for several ranks or for a timeline."""

    def execute(self, plan: StepPlan) -> Outcome: ...

    def forward(self, plan: StepPlan) -> Forwarded: ...

    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None: ...

    def replays(self, plan: StepPlan) -> bool:
        """Return whether `execute` would only replay captured graphs."""
        ...

    def close(self) -> None:
        """End worker threads, if there are any. No step may follow."""
        ...
