"""From a plan to tensors: decode ids and lengths come from the device's rows, prefill from the plan."""

from __future__ import annotations

import torch

from aengine.cache.snapshots import slot_of
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.step.cells import StepCells, StepShape, StepTensors, describe, host_lens, resolve
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.state_cells import StateCells
from aengine.step_plan import NewRow, Pool, PrefillChunk, StepPlan

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


def rows_of(*owners: tuple[int, int, list[int]], drafts: int = 0) -> Rows:
    """(row, length, pages) each; the token drawn last is 100 + row. drafts: the most in a step."""
    rows = Rows(8, 4, torch.device("cpu"), most_drafts=drafts, recurrent=True)
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


def resolved(step: StepPlan, rows: Rows, shape: StepShape | None = None, recurrent: bool = False) -> StepTensors:
    shape = shape or StepShape.of_plan(step)
    numbers = describe(step, shape, rows.padding, limit=8, recurrent=recurrent)
    cells = StepCells.over(torch.from_numpy(numbers), shape, recurrent)
    return resolve(cells, shape, rows, PAGE, adapted=False, width=4)


def test_a_decode_feeds_what_its_row_drew_last_and_makes_it_longer() -> None:
    rows = rows_of((5, 6, [3, 7]), (2, 3, [9]))
    rows.lengths[5] = 40  # the host may think that a row is longer than it is
    tensors = resolved(plan(decode=[5, 2]), rows)
    assert tensors.token_ids.tolist() == [105, 102]
    assert tensors.positions.tolist() == [6, 3]
    assert tensors.slots.tolist() == [7 * PAGE + 2, 9 * PAGE + 3]
    assert tensors.seq_lens.tolist() == [7, 4]
    assert tensors.query_starts.tolist() == [0, 1, 2]
    assert (tensors.num_decodes, tensors.wanted.tolist()) == (2, [0, 1])
    assert rows.length[[5, 2]].tolist() == [7, 4]
    assert host_lens(plan(decode=[5, 2]), rows.lengths) == ([1, 1], [41, 4])


def test_rows_within_the_trained_context_are_rotated_elsewhere_and_draw_for_the_same_places() -> None:
    rows = Rows(2, 4, torch.device("cpu"), near_shift=1000)
    new = {"params": SamplingParams(), "seed": 0, "stop_ids": (), "prompt_len": 1, "tokens": [1], "length": 2}
    rows.admit([NewRow(row=row, pages=[3 + row], near=row == 1, **new) for row in range(2)])
    chunk = PrefillChunk(row=1, start=2, token_ids=[7, 8], samples=True)
    tensors = resolved(plan(decode=[0], prefill=[chunk]), rows)
    assert tensors.positions.tolist() == [2, 1002, 1003]
    assert tensors.next_positions.tolist() == [3, 4]


LAST = PrefillChunk(row=1, start=4, token_ids=[11, 12, 13], samples=True, forks=[6], saves=[(3, 17)])
FIRST = PrefillChunk(row=4, start=0, token_ids=[21, 22], samples=False)


def test_a_mixed_step_puts_decodes_first_and_draws_only_after_the_last_token_of_a_prompt() -> None:
    rows = rows_of((0, 6, [3, 7]), (1, 4, [2, 5]), (4, 0, [8]), (6, 2, [8]))
    step = plan(decode=[0], prefill=[LAST, FIRST])
    tensors = resolved(step, rows)
    assert tensors.token_ids.tolist() == [100, 11, 12, 13, 21, 22]
    assert tensors.positions.tolist() == [6, 4, 5, 6, 0, 1]
    assert tensors.slots.tolist() == [30, 20, 21, 22, 32, 33]
    assert tensors.query_starts.tolist() == [0, 1, 4, 6]
    assert tensors.seq_lens.tolist() == [7, 7, 2]
    assert tensors.num_decodes == 1
    assert tensors.wanted.tolist() == [0, 3, 3]  # the fork draws from the same logits
    assert rows.length.tolist() == [7, 7, 0, 0, 2, 0, 2, 0, 0]
    rows.advance(step)
    assert rows.lengths == rows.length.tolist()
    assert host_lens(step, [6, 4, 0, 0, 0, 0, 0]) == ([1, 3, 2], [7, 7, 2])


def test_recurrent_layers_go_on_in_a_rows_slot_and_begin_with_nothing() -> None:
    rows = rows_of((0, 6, [3, 7]), (1, 4, [2, 5]), (4, 0, [8]))
    states = resolved(plan(decode=[0], prefill=[LAST, FIRST]), rows, recurrent=True).states
    assert states is not None
    assert states.slots.tolist() == [slot_of(0), slot_of(1), slot_of(4)]
    assert states.sources.tolist() == [slot_of(0), slot_of(1), 0]
    assert states.starts.tolist() == [1, 4, 6]
    assert states.saves.tolist() == [0, 0, 0, 17, 0, 0]
    assert states.num_decodes == 1


def test_a_padded_step_is_the_same_step_beside_a_chunk_of_the_padding_row() -> None:
    shape = StepShape(tokens=12, decodes=4, chunks=3, wanted=4, has_padding=True)
    step = plan(
        decode=[2],
        prefill=[
            PrefillChunk(row=0, start=3, token_ids=[7, 8, 9], samples=True, forks=[1]),
            PrefillChunk(row=3, start=0, token_ids=[5, 6], samples=False, pool=Pool("last")),
        ],
    )
    numbers = torch.from_numpy(describe(step, shape, padding=4, limit=4, recurrent=True))
    cells = StepCells.over(numbers, shape, recurrent=True)
    assert {name: getattr(cells, name).tolist() for name in StepCells.__slots__ if name != "states"} == {
        "token_ids": [0, 7, 8, 9, 5, 6, 0, 0, 0, 0, 0, 0],
        "sources": [2] + [4] * 11,
        "positions": [0, 0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1],
        "token_rows": [2, 0, 0, 0, 3, 3, 4, 4, 4, 4, 4, 4],
        "rows": [2, 4, 4, 4, 0, 3, 4],
        "lens": [1, -1, -1, -1, 3, 2, 4],
        "query_starts": [0, 1, 1, 1, 1, 4, 6, 12],
        "wanted": [0, 3, 3, 5],
        "draw_rows": [2, 0, 1, 0],
    }
    states = cells.states
    assert states is not None
    assert {name: getattr(states, name).tolist() for name in StateCells.__slots__} == {
        "slots": [slot_of(2), -1, -1, -1, slot_of(0), slot_of(3), 0],
        "sources": [slot_of(2), 0, 0, 0, slot_of(0), 0, 0],
        "saves": [0] * 12,
        "decoding": [1, 0, 0, 0, 0, 0, 0],
        "save_after": [0] * 7,
        "save_slots": [0] * 7,
    }


def test_padding_changes_no_row_and_is_no_decode() -> None:
    rows = rows_of((0, 6, [3, 7]), (1, 4, [2, 5]), (4, 0, [8]), (6, 2, [8]))
    step, shape = (
        plan(decode=[0], prefill=[LAST, FIRST]),
        StepShape(tokens=9, decodes=3, chunks=4, wanted=5, has_padding=True),
    )
    tensors = resolved(step, rows, shape)
    assert tensors.seq_lens.tolist() == [7, -1, -1, 7, 2, 3, 0]
    assert tensors.slots.tolist() == [30, 20, 21, 22, 32, 33, 0, 1, 2]
    assert rows.length.tolist() == [7, 7, 0, 0, 2, 0, 2, 0, 0]


def test_a_step_with_more_chunks_or_draws_than_there_is_room_for_does_not_fit() -> None:
    shape = StepShape(tokens=16, decodes=3, chunks=3, wanted=3)
    chunk = PrefillChunk(row=0, start=0, token_ids=[1], samples=True)
    assert shape.has_room_for(plan(prefill=[chunk] * 2))
    assert not shape.has_room_for(plan(prefill=[chunk] * 3))  # the padding is a chunk too
    many = PrefillChunk(row=0, start=0, token_ids=[1], samples=True, forks=[1, 2, 3])
    assert not shape.has_room_for(plan(prefill=[many]))
    pooled = PrefillChunk(row=1, start=0, token_ids=[1], samples=False, pool=Pool("last"))
    two = PrefillChunk(row=0, start=0, token_ids=[1], samples=True, forks=[2])
    assert shape.has_room_for(plan(prefill=[two, pooled]))
    assert not shape.has_room_for(plan(decode=[3], prefill=[two, pooled]))


def test_pages_are_appended_to_a_rows_table() -> None:
    rows = rows_of((3, 4, [6]))
    rows.grow([(3, 1, 9)])
    assert rows.page_table[3].tolist()[:2] == [6, 9]
    assert rows.slots(torch.tensor([3, 3]), torch.tensor([3, 4]), PAGE).tolist() == [27, 36]


def test_the_padding_row_has_no_length_and_only_page_0() -> None:
    rows = rows_of((0, 4, [6]))
    assert rows.length[rows.padding] == 0
    assert rows.page_table[rows.padding].tolist() == [0, 0, 0, 0]
