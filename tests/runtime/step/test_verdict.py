"""Rows keep their drafts while these equal the draws, up to a limit, and their lengths and last tokens follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.runtime.step.executor import Outcome
from aengine.runtime.step.results import read_outcome
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.verdict import DraftedRows, draw_in_rounds, verify
from aengine.sampling.sampler import Draws
from aengine.step_plan import StepPlan

CPU = torch.device("cpu")
DRAFTS = {1: [11, 12, 13], 3: [31, 32]}  # by row
DRAWN = [5, 11, 12, 13, 14, 31, 32, 33]  # row 0 has no drafts; rows 1 and 3 draw what they drafted


def drafted_step(**options: object) -> tuple[StepPlan, Rows]:
    """Return a step of three rows, of which two verify drafts, and the rows after its forward pass."""
    rows = Rows(max_rows=4, pages_per_row=2, device=CPU, most_drafts=3)
    for row, drafts in DRAFTS.items():
        rows.next_tokens[1 : 1 + len(drafts), row] = torch.tensor(drafts)
    rows.length[:4] = torch.tensor([8, 20, 0, 30])
    plan = StepPlan(0, [], [], [0, 1, 3], [], [], drafts=[0, 3, 2], contexts=[8, 20, 30], **options)  # type: ignore[arg-type]
    return plan, rows


def drafted_of(plan: StepPlan) -> DraftedRows:
    drafted = DraftedRows.of_plan(plan, CPU)
    assert drafted is not None
    return drafted


@pytest.mark.parametrize(
    ("limits", "counts"),
    [({}, [4, 3]), ({1: 2}, [3, 3]), ({1: 0, 3: 1}, [1, 2]), ({0: 0, 1: 3, 3: 2}, [4, 3])],
    ids=str,
)
def test_no_row_accepts_more_drafts_than_its_limit(limits: dict[int, int], counts: list[int]) -> None:
    plan, rows = drafted_step(draft_limits=limits)
    draws = Draws(torch.tensor(DRAWN), torch.ones(8, dtype=torch.bool), None)
    verify(drafted_of(plan), draws, rows)
    assert draws.counts is not None
    assert draws.counts.tolist() == counts
    assert rows.length[:4].tolist() == [8, 20 - (4 - counts[0]), 0, 30 - (3 - counts[1])]
    assert rows.last_token[[1, 3]].tolist() == [DRAWN[counts[0]], DRAWN[4 + counts[1]]]
    result = read_outcome(Outcome(draws), lambda row: None, plan)
    assert result.counts == [1, *counts]
    assert result.token_ids == [5, *DRAWN[1 : 1 + counts[0]], *DRAWN[5 : 5 + counts[1]]]


@pytest.mark.parametrize(
    ("limits", "counted"),
    [({}, [[True, True], [True, True], [True]]), ({1: 1, 3: 0}, [[True, False], [False, False], [False]])],
    ids=str,
)
def test_draws_after_the_limit_are_not_counted(limits: dict[int, int], counted: list[list[bool]]) -> None:
    """Penalties must not see a token that the row drops."""
    plan, rows = drafted_step(draft_limits=limits)
    seen: list[list[bool]] = []

    def sample(places: list[int], counts: Tensor | None) -> Draws:
        if counts is not None:
            seen.append(counts.tolist())
        return Draws(torch.tensor(DRAWN)[places], torch.ones(len(places), dtype=torch.bool), None)

    draws = draw_in_rounds(drafted_of(plan), len(DRAWN), rows, sample)
    assert draws.token_ids.tolist() == DRAWN
    assert seen == counted


def test_a_result_has_the_drafts_that_the_step_has_made() -> None:
    plan, rows = drafted_step()
    draws = Draws(torch.tensor(DRAWN), torch.ones(3, dtype=torch.bool), None, torch.tensor([4, 3]))
    assert read_outcome(Outcome(draws), lambda row: None, plan).proposed == []
    draws.proposed = rows.drafts(torch.tensor([1, 3]), 2)
    assert read_outcome(Outcome(draws), lambda row: None, plan).proposed == [[11, 12], [31, 32]]
