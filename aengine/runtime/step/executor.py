"""What computes a step, and a step between its two halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.runtime.step.pooling import ChunkPools
from aengine.runtime.step.scoring import ChunkScores
from aengine.runtime.step.written import WrittenDraws
from aengine.sampling.sampler import Draws
from aengine.step_plan import StepPlan


@dataclass(slots=True)
class Outcome:
    """What a step brought, on the device or on its way to the host."""

    draws: Draws | None  # None where nothing draws, or all of it is written
    scores: Sequence[ChunkScores] = ()  # of the chunks with `score_ids`
    sums: Tensor | None = None  # [tokens] float32, as `Decoder.forward` fills them; None without chunks
    pools: ChunkPools | None = None  # of the chunks with a `pool`
    written: WrittenDraws | None = None  # in place of `draws`


@dataclass(slots=True)
class Forwarded:
    """A step after its forward pass."""

    logits: Tensor | None  # [draws, vocab] in the model's dtype; None where nothing draws
    row_list: list[int]  # which rows draw
    rows: Tensor  # [draws] int64, the same
    positions: Tensor  # [draws] int64: the place that the drawn token takes in its sequence
    scores: Sequence[ChunkScores] = ()  # as in `Outcome`
    sums: Tensor | None = None
    pools: ChunkPools | None = None
    own: bool = False  # of several ranks: the logits are of this one's tokens alone

    def outcome(self, draws: Draws | None) -> Outcome:
        """What the step brought, with its draws."""
        return Outcome(draws, self.scores, self.sums, self.pools)


class Executor(Protocol):
    """What a runner needs of a `StepExecutor`, and a timeline's stand-in has as well."""

    def execute(self, plan: StepPlan) -> Outcome: ...

    def forward(self, plan: StepPlan) -> Forwarded: ...

    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None: ...

    def replays(self, plan: StepPlan) -> bool:
        """Whether `execute` launches captured steps and nothing else."""
        ...

    def close(self) -> None:
        """End what runs beside the caller, if anything does; nothing is to be executed any more."""
        ...
