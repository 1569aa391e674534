"""A row with drafts continues from the state that its last step left, whatever the verdict was."""

from __future__ import annotations

import pytest

from aengine.cache.snapshots import slot_of
from aengine.kernels.recurrent.state import DraftedBatch, StateBatch
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.step.cells import StepShape
from aengine.runtime.step.rows import Rows
from aengine.step_plan import NewRow, PrefillChunk, StepPlan
from tests.runtime.step.test_cells import plan, resolved, rows_of

FIRST = PrefillChunk(row=4, start=0, token_ids=[21, 22], samples=False, saves=[(2, 30)])


def states_of(step: StepPlan, rows: Rows, shape: StepShape | None = None) -> tuple[StateBatch, DraftedBatch]:
    states = resolved(step, rows, shape, recurrent=True).states
    assert states is not None
    assert states.drafted is not None
    return states, states.drafted


def prefilled() -> Rows:
    """Rows 0, 1 and 2 have computed 6, 4 and 5 tokens of prompts."""
    rows = rows_of((0, 0, [3, 7]), (1, 0, [2, 5]), (2, 0, [8, 9]), (4, 0, [6]), drafts=3)
    chunks = [PrefillChunk(row, 0, [1] * length, samples=True) for row, length in ((0, 6), (1, 4), (2, 5))]
    _, drafted = states_of(plan(prefill=chunks), rows)
    assert drafted.read.tolist() == [-1, -1, -1]
    return rows


@pytest.mark.parametrize("padded", [False, True])
def test_rows_with_drafts_are_chunks_that_decode(padded: bool) -> None:
    rows = prefilled()
    step = plan(decode=[1, 0, 2], drafts=[0, 3, 1], contexts=[5, 10, 7], prefill=[FIRST], state_saves=[(0, 8, 17)])
    shape = StepShape(tokens=12, decodes=2, chunks=4, wanted=9, has_padding=True) if padded else None
    states, drafted = states_of(step, rows, shape)
    missing, rest = ([-1], [0]) if padded else ([], [])
    assert states.slots.tolist() == [slot_of(1), *missing, slot_of(0), slot_of(2), slot_of(4), *rest]
    assert states.starts.tolist() == [1, 5, 7, 9] + [12] * padded
    assert states.saves.tolist() == [0] * 8 + [30] + [0] * 3 * padded
    assert drafted.read.tolist() == [4, *missing, 6, 5, -1] + [-1] * padded
    assert drafted.save_after.tolist() == [0, *rest, 8, 0, 0, *rest]
    assert drafted.save_slots.tolist() == [0, *rest, 17, 0, 0, *rest]


def test_the_state_contains_the_first_token_of_a_step_with_drafts() -> None:
    rows = prefilled()
    states_of(plan(decode=[1, 0], drafts=[0, 3], contexts=[5, 10]), rows)
    rows.length[0] -= 2  # the verdict: one of three drafts is accepted
    _, drafted = states_of(plan(decode=[1, 0], drafts=[2, 3], contexts=[8, 14]), rows)
    assert drafted.read.tolist() == [5, 7]
    rows.length[1] -= 2  # none is accepted
    _, drafted = states_of(plan(decode=[1, 0], drafts=[0, 0], contexts=[9, 15]), rows)
    assert drafted.read.tolist() == [6, 9]
    assert rows.length[[1, 0]].tolist() == [7, 13]


def test_a_row_that_forks_continues_from_the_end_of_the_prompt() -> None:
    rows = prefilled()
    params = SamplingParams()
    copy = NewRow(
        row=5, params=params, seed=0, stop_ids=(), prompt_len=4, tokens=[1] * 6, length=6, pages=[], copy_of=0
    )
    rows.admit([copy])
    _, drafted = states_of(plan(decode=[5], drafts=[2], contexts=[9]), rows)
    assert drafted.read.tolist() == [6]
