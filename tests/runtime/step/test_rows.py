"""Rows on the device: the pages and lengths of new sequences, given by the plan or copied from a fork's source."""

from __future__ import annotations

import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.step.rows import Rows
from aengine.step_plan import NewRow


def new(row: int, length: int, pages: list[int], copy_of: int | None = None) -> NewRow:
    return NewRow(
        row=row,
        params=SamplingParams(),
        seed=0,
        stop_ids=(),
        prompt_len=1,
        tokens=[1],
        length=length,
        pages=pages,
        copy_of=copy_of,
    )


def test_a_row_that_forks_has_the_pages_of_its_source_and_then_its_own() -> None:
    rows = Rows(6, 5, torch.device("cpu"))
    rows.admit([new(3, 4, [7, 8, 9]), new(1, 9, [], copy_of=3), new(5, 9, [], copy_of=3), new(0, 2, [4])])
    rows.grow([(1, 2, 21), (5, 2, 22)])
    assert rows.page_table[[3, 1, 5, 0], :3].tolist() == [[7, 8, 9], [7, 8, 21], [7, 8, 22], [4, 0, 0]]
    assert rows.length[[3, 1, 5, 0]].tolist() == [4, 9, 9, 2]
    assert [rows.lengths[row] for row in (3, 1, 5, 0)] == [4, 9, 9, 2]


def test_a_row_may_fork_from_one_that_entered_long_before() -> None:
    rows = Rows(6, 5, torch.device("cpu"))
    rows.admit([new(3, 4, [7, 8])])
    rows.grow([(3, 2, 9)])
    rows.admit([new(1, 9, [], copy_of=3)])
    assert rows.page_table[1, :3].tolist() == [7, 8, 9]


def test_integers_are_uploaded_to_the_device_of_the_rows() -> None:
    rows = Rows(6, 5, torch.device("meta"))
    assert rows.upload([1, 2]).device == rows.page_table.device
