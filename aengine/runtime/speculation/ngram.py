"""Drafts what followed when a row's last tokens occurred before: answers often quote their prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aengine.kernels.ngram.base import NgramKernels
from aengine.model.drafting.base import Taps
from aengine.runtime.speculation.base import Kept
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.upload import upload
from aengine.step_plan import NewRow, StepPlan

LONGEST, SHORTEST = 5, 2  # tokens of the n-grams


class NgramProposer:
    """`Proposer` that keeps each row's tokens on the device, and searches them for its last few."""

    name = "ngram"
    taps: Taps | None = None

    def __init__(self, kernels: NgramKernels, rows: Rows, capacity: int) -> None:
        """capacity: the most tokens of a row; later ones are not searched."""
        self._kernels = kernels
        self._history = torch.zeros((rows.count, capacity), dtype=torch.int32, device=rows.device)

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        history = self._history
        for new in new_rows:
            if new.copy_of is not None:
                history[new.row] = history[new.copy_of]
            else:
                tokens = np.array(new.tokens[: history.shape[1]], dtype=np.int32)
                history[new.row, : len(tokens)] = upload(tokens, history.device)

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        if kept is None:
            return
        known = rows.length + 1  # the last token has no keys and values yet
        before = known.index_add(0, kept.rows, -kept.counts)
        self._kernels.append(self._history, before, kept.rows, kept.tokens, kept.counts)
        if most := plan.proposals:
            drafts = self._kernels.match(self._history, known, kept.rows, LONGEST, SHORTEST, most)
            rows.next_tokens[1 : most + 1].index_copy_(1, kept.rows, drafts.clamp_(min=0).T)
