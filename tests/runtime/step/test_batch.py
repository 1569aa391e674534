"""From a plan to tensors: decode ids and lengths come from the device's rows, prefill from the plan."""

from __future__ import annotations

import torch

from aengine.runtime.step.batch import build_inputs
from aengine.runtime.step.rows import Rows
from aengine.sampling_params import SamplingParams
from aengine.step_plan import NewRow, PrefillChunk, StepPlan

PAGE = 4


def plan(**parts: object) -> StepPlan:
    empty = {
        "step": 0,
        "new_rows": [],
        "new_pages": [],
        "decode": [],
        "prefill": [],
        "page_copies": [],
    }
    return StepPlan(**{**empty, **parts})


def rows_of(*owners: tuple[int, int, list[int]]) -> Rows:
    """(row, length, pages) each; the token drawn last is 100 + row."""
    rows = Rows(8, 4, torch.device("cpu"))
    rows.admit(
        [
            NewRow(
                row=row,
                params=SamplingParams(),
                seed=0,
                stop_ids=(),
                prompt_len=1,
                tokens=[1],
                length=length,
                pages=pages,
            )
            for row, length, pages in owners
        ]
    )
    rows.last_token[:8] = torch.arange(100, 108)
    return rows


def test_a_decode_step_feeds_what_each_row_drew_last() -> None:
    rows = rows_of((5, 6, [3, 7]), (2, 3, [9]))
    inputs = build_inputs(plan(decode=[5, 2]), rows, PAGE)
    assert inputs.input_ids.tolist() == [105, 102]
    assert inputs.positions.tolist() == [6, 3]
    assert inputs.attention.slots.tolist() == [7 * PAGE + 2, 9 * PAGE + 3]
    assert inputs.attention.seq_lens.tolist() == [7, 4]
    assert inputs.attention.context_lens == [7, 4]
    assert inputs.draw_tokens is None
    assert inputs.draw_positions.tolist() == [7, 4]  # where the drawn tokens will stand


def test_a_mixed_step_puts_decodes_first_and_draws_only_where_a_prompt_ends() -> None:
    rows = rows_of((0, 6, [3, 7]), (1, 4, [2, 5]), (4, 0, [8]), (6, 2, [8]))
    last = PrefillChunk(row=1, start=4, token_ids=[11, 12, 13], samples=True, forks=[6])
    first = PrefillChunk(row=4, start=0, token_ids=[21, 22], samples=False)
    inputs = build_inputs(plan(decode=[0], prefill=[last, first]), rows, PAGE)
    assert inputs.input_ids.tolist() == [100, 11, 12, 13, 21, 22]
    assert inputs.positions.tolist() == [6, 4, 5, 6, 0, 1]
    assert inputs.attention.slots.tolist() == [30, 20, 21, 22, 32, 33]
    assert inputs.attention.query_starts.tolist() == [0, 1, 4, 6]
    assert inputs.attention.num_decodes == 1
    assert inputs.draw_row_list == [0, 1, 6]  # the fork draws from the same logits
    assert inputs.draw_tokens is not None
    assert inputs.draw_tokens.tolist() == [0, 3, 3]
    assert inputs.draw_positions.tolist() == [7, 7, 7]


def test_pages_are_appended_to_a_rows_table() -> None:
    rows = rows_of((3, 4, [6]))
    rows.grow([(3, 1, 9)])
    assert rows.page_table[3].tolist()[:2] == [6, 9]
    assert rows.slots(torch.tensor([3, 3]), torch.tensor([3, 4]), PAGE).tolist() == [27, 36]


def test_the_padding_row_has_no_length_and_only_page_0() -> None:
    rows = rows_of((0, 4, [6]))
    assert rows.length[rows.padding] == 0
    assert rows.page_table[rows.padding].tolist() == [0, 0, 0, 0]
