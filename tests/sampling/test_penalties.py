"""Repetition, presence and frequency penalties, and the token counts that they need."""

from __future__ import annotations

import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Sampler
from aengine.sampling.penalties import FEW_ROWS
from aengine.step_plan import NewRow
from tests.sampling.build import CPU, draw, draw_one, new_row


def test_repetition_divides_positive_logits_and_multiplies_negative_ones() -> None:
    repeated = {"temperature": 0, "repetition_penalty": 2.0}
    assert draw_one([2.0, 1.1], **repeated, prompt=[0]) == 1
    assert draw_one([2.0, 0.9], **repeated, prompt=[0]) == 0
    assert draw_one([-1.0, -1.9], **repeated, prompt=[0]) == 1
    assert draw_one([-1.0, -2.1], **repeated, prompt=[0]) == 0


def test_repetition_sees_prompt_and_output_and_does_not_count() -> None:
    repeated = {"temperature": 0, "repetition_penalty": 2.0}
    assert draw_one([2.0, 1.1], **repeated, prompt=[1, 0], output=[1]) == 0
    assert draw_one([2.0, 1.1], **repeated, prompt=[5 % 2, 0, 0, 0], output=[0]) == 0
    assert draw_one([2.0, 1.1, 1.5], **repeated, prompt=[2], output=[0, 0]) == 1


def test_presence_is_subtracted_once_and_frequency_for_each_time() -> None:
    assert draw_one([2.0, 0.9], temperature=0, presence_penalty=1.0, output=[0, 0, 0]) == 0
    assert draw_one([2.0, 1.1], temperature=0, presence_penalty=1.0, output=[0]) == 1
    assert draw_one([2.0, 0.9], temperature=0, frequency_penalty=0.5, output=[0, 0]) == 0
    assert draw_one([2.0, 0.9], temperature=0, frequency_penalty=0.5, output=[0, 0, 0]) == 1


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    assert draw_one([2.0, 1.9], temperature=0, presence_penalty=2.0, frequency_penalty=2.0, prompt=[0, 0]) == 0


def test_negative_penalties_encourage() -> None:
    assert draw_one([0.0, 1.0], temperature=0, presence_penalty=-1.5, output=[0]) == 0
    assert draw_one([0.0, 1.0], temperature=0, frequency_penalty=-0.6, output=[0, 0]) == 0


@pytest.mark.parametrize("repetition_penalty", [1e4, 1e-12, 1e-50])
def test_extreme_repetition_penalties_stay_finite(repetition_penalty: float) -> None:
    expected = 1 if repetition_penalty > 1 else 0
    drawn = draw_one([2.0, 1.0, -1.0], temperature=0, repetition_penalty=repetition_penalty, prompt=[0, 2])
    assert drawn == expected
    assert draw_one([0.0, 1.0], temperature=0, repetition_penalty=repetition_penalty, prompt=[0]) == 1


def test_drawn_tokens_count_from_the_next_draw_on() -> None:
    sampler = Sampler(2, 3, CPU)
    sampler.set_rows([new_row(1, SamplingParams(temperature=0, frequency_penalty=1.0))])
    logits = torch.tensor([[1.0, 2.5, 0.0]])
    drawn = [int(draw(sampler, logits, [1], [position]).token_ids) for position in range(1, 7)]
    assert drawn == [1, 1, 0, 1, 0, 2]


def test_rows_count_independently() -> None:
    sampler = Sampler(3, 2, CPU)
    counted = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler.set_rows([new_row(0, counted), new_row(1, SamplingParams(temperature=0)), new_row(2, counted, output=[0])])
    logits = torch.tensor([[1.0, 0.0]] * 3)
    assert draw(sampler, logits, [2, 1, 0], [2, 2, 1]).token_ids.tolist() == [1, 0, 0]
    assert draw(sampler, logits, [0, 1, 2], [2, 3, 3]).token_ids.tolist() == [1, 0, 0]


@pytest.mark.parametrize("interrupted_after", range(1, 12))
def test_resuming_after_preemption_is_the_same_as_never_having_stopped(interrupted_after: int) -> None:
    """Counts rebuilt from ids equal counts updated with each draw."""
    torch.manual_seed(3)
    steps = torch.randn(12, 1, 16)
    params = SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9, top_p=0.9
    )
    prompt = [3, 1, 4, 1, 5]

    def tokens(stop_at: int | None) -> list[int]:
        sampler = Sampler(4, 16, CPU)
        row, output = 2, list[int]()
        sampler.set_rows([new_row(row, params, seed=8, prompt=prompt)])
        for step, logits in enumerate(steps):
            if step == stop_at:
                sampler.set_rows([new_row(row, SamplingParams(temperature=0, frequency_penalty=1.0), output=[7] * 9)])
                row = 0
                sampler.set_rows([new_row(row, params, seed=8, prompt=prompt, output=output)])
            output.append(int(draw(sampler, logits, [row], [len(prompt) + step]).token_ids))
        return output

    assert tokens(interrupted_after) == tokens(None)


def test_the_tokens_of_a_prompt_may_come_as_any_sequence() -> None:
    sampler = Sampler(1, 3, CPU)
    params = SamplingParams(temperature=0, repetition_penalty=3.0)
    row = NewRow(row=0, params=params, seed=0, stop_ids=(), prompt_len=2, tokens=(0, 1), length=0, pages=[])
    sampler.set_rows([row])
    assert draw(sampler, torch.tensor([[2.0, 1.5, 1.0]]), [0], [2]).token_ids.tolist() == [2]


def test_counts_are_allocated_when_the_first_row_needs_them() -> None:
    sampler = Sampler(4, 100, CPU)
    sampler.set_rows([new_row(0, SamplingParams(temperature=0))])
    draw(sampler, torch.randn(1, 100), [0], [1])
    assert sampler._counts._table is None
    sampler.set_rows([new_row(1, SamplingParams(temperature=0, presence_penalty=1.0))])
    assert sampler._counts.cells.dtype == torch.int32
    assert sampler._counts.cells.shape == (4, 100)


def test_counts_of_the_first_rows_take_no_room_for_all() -> None:
    counted = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampler = Sampler(FEW_ROWS + 8, 5, CPU)
    sampler.set_rows([new_row(FEW_ROWS - 1, counted, output=[3, 3])])
    assert sampler._counts.cells.shape == (FEW_ROWS, 5)
    sampler.set_rows([new_row(FEW_ROWS, counted, output=[1])])
    cells = sampler._counts.cells
    assert cells.shape == (FEW_ROWS + 8, 5)
    assert cells[FEW_ROWS - 1].tolist() == [1, 0, 0, 4, 0]  # its prompt is token 0
    assert cells[FEW_ROWS].tolist() == [1, 2, 0, 0, 0]


def test_a_fork_into_a_row_beyond_the_first_few_keeps_its_leaders_counts() -> None:
    counted = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampler = Sampler(FEW_ROWS + 1, 3, CPU)
    sampler.set_rows([new_row(0, counted, output=[0, 0])])
    fork = NewRow(
        row=FEW_ROWS, params=counted, seed=1, stop_ids=(), prompt_len=0, tokens=[0, 0], length=2, pages=[], copy_of=0
    )
    sampler.set_rows([fork])
    logits = torch.tensor([[2.5, 1.0, 0.0]] * 2)
    assert draw(sampler, logits, [FEW_ROWS, 0], [3, 3]).token_ids.tolist() == [1, 1]
    assert draw(sampler, logits, [FEW_ROWS, 0], [4, 4]).token_ids.tolist() == [0, 0]
