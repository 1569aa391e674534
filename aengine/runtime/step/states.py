"""A step as recurrent layers see it, made of its plan."""

from __future__ import annotations

import itertools

from torch import Tensor

from aengine.cache.snapshots import slot_of
from aengine.kernels.delta.base import StateBatch
from aengine.runtime.step.rows import Upload
from aengine.step_plan import StepPlan


def state_batch(plan: StepPlan, positions: Tensor, upload: Upload) -> StateBatch:
    """positions [tokens] int64: of the step's tokens. A row goes on in its own slot; position 0 begins with nothing."""
    decodes, tokens = len(plan.decode), plan.num_tokens
    slots = [slot_of(row) for row in plan.decode] + [slot_of(chunk.row) for chunk in plan.prefill]
    sources = slots[:decodes] + [slot_of(chunk.row) if chunk.start else 0 for chunk in plan.prefill]
    starts = [*itertools.accumulate((len(chunk.token_ids) for chunk in plan.prefill), initial=decodes)]
    parts = (slots, sources, starts, token_saves(plan, tokens))
    sent = upload([value for part in parts for value in part]).int().split([len(part) for part in parts])
    return StateBatch(
        slots=sent[0], sources=sent[1], starts=sent[2], positions=positions, saves=sent[3], num_decodes=decodes
    )


def token_saves(plan: StepPlan, tokens: int) -> list[int]:
    """The slot that gets the state behind each token of a step; 0: none. tokens: of the step, padding included."""
    saves = [0] * tokens
    at = len(plan.decode)
    for chunk in plan.prefill:
        for count, slot in chunk.saves:
            saves[at + count - 1] = slot
        at += len(chunk.token_ids)
    return saves
