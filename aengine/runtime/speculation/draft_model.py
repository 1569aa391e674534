"""Drafts with a smaller model of the same vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.model.decoder import Decoder
from aengine.model.drafting.base import Taps
from aengine.runtime.speculation.base import Kept, PagedProposer
from aengine.runtime.speculation.runs import one_token_runs
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.step_plan import StepPlan


class DraftModelProposer(PagedProposer):
    """Runs a model over every token of a step, and then once for each draft.

    The model's keys and values of a token are at the token's own place in the pages, in layers after the target's. The
    first run writes them for tokens that the target has computed. The others write them for tokens to come.
    """

    def __init__(self, model: Decoder, target: Decoder, kv: KVPool, sampler: Sampler) -> None:
        """kv: The pool of both. sampler: The target's."""
        super().__init__("draft", Taps(tokens_only=True))
        self._model = model
        self._near_shift = target.near_shift
        self._table_length = target.tables.length
        self._kv = kv
        self._sampler = sampler

    def _draft(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs) -> Tensor | None:
        model, none = self._model, inputs.token_ids[:0]
        model.forward(inputs.token_ids, self._own_positions(inputs.positions), inputs.batch, self._kv, none)
        if kept is None or not plan.proposals:
            return None
        # The token at p is read to draft the one at p + 1. The row's last token is at `Rows.length`.
        columns = torch.arange(plan.proposals, device=rows.device)
        positions = rows.length.index_select(0, kept.rows) + columns[:, None]
        token_ids, drafts = rows.last_token.index_select(0, kept.rows), []
        runs = one_token_runs(self._kv, positions, kept.rows, rows, plan, self._table_length)
        for of_draft, (rotary, batch) in zip(positions + 1, runs, strict=True):
            hidden = model.forward(token_ids, self._own_positions(rotary), batch, self._kv)
            # A draft has the noise that the target will have at its position.
            token_ids = self._sampler.draw_simple(model.logits(hidden), kept.rows, of_draft).token_ids
            drafts.append(token_ids)
        return torch.stack(drafts)

    def _own_positions(self, positions: Tensor) -> Tensor:
        """Return the positions by which the model rotates. No draft model has longrope."""
        return positions.remainder(self._near_shift) if self._near_shift else positions
