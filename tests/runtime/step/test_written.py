from __future__ import annotations

import torch

from aengine.runtime.step.written import TURNS, WrittenDraws


def test_a_step_reads_its_own_turn_of_each_row() -> None:
    cells = torch.arange(5 * TURNS).view(5, TURNS)
    cells[3, 1] = ~7
    assert WrittenDraws(cells, [3 * TURNS + 1, 2, 4 * TURNS + 3]).read() == ([7, 2, 19], [False, True, True], [])


def test_the_first_token_may_be_drawn_and_not_be_finite() -> None:
    cells = torch.tensor([[0, ~0, 0, 0]])
    assert WrittenDraws(cells, [0, 1]).read() == ([0, 0], [True, False], [])
