"""A proposer that drafts known answers with some errors. A CUDA graph can capture it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aengine.model.drafting.base import Taps
from aengine.runtime.speculation.base import Kept, ProposerParts
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.step_plan import NewRow, StepPlan


class KnownAnswers:
    """`Proposer` whose drafts are the tokens of known texts, except every tenth."""

    name = "known"
    taps: Taps | None = None

    def __init__(self, texts: Sequence[Sequence[int]], parts: ProposerParts) -> None:
        """texts: prompts with their answers. No prompt begins another text."""
        self._texts = [list(text) for text in texts]
        rows, longest = parts.rows, max(map(len, texts), default=1)
        self._known = torch.zeros((rows.count, longest), dtype=torch.int64, device=rows.device)

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            prompt = list(new.tokens[: new.prompt_len])
            text = next((text for text in self._texts if text[: len(prompt)] == prompt), [])
            self._known[new.row, : len(text)] = torch.tensor(text, dtype=torch.int64, device=self._known.device)

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        if kept is None or not plan.proposals:
            return
        columns = torch.arange(1, plan.proposals + 1, device=rows.device)
        positions = rows.length.index_select(0, kept.rows)[:, None] + columns
        inside = positions.clamp(max=self._known.shape[1] - 1)
        right = self._known.index_select(0, kept.rows).gather(1, inside)
        drafts = torch.where(positions % 10 == 3, 5, right)
        rows.next_tokens[1 : plan.proposals + 1].index_copy_(1, kept.rows, drafts.T)
