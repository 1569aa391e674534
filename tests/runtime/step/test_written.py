from __future__ import annotations

import torch

from aengine.runtime.step.written import WrittenVerdicts


def test_without_drafts_each_row_has_its_draw() -> None:
    cells = torch.tensor([[7, 0], [2, ~0], [0, 0]])  # the second draw is not finite
    assert WrittenVerdicts(cells, []).read() == ([7, 2, 0], [True, False, True], [])


def test_a_row_keeps_the_draws_up_to_its_first_refused_draft() -> None:
    cells = torch.tensor([[7, 8, 9, 0], [2, 3, 4, 1], [5, 6, 1, ~2], [4, 9, 9, 0]])
    tokens, finite, counts = WrittenVerdicts(cells, [2, 2, 2, 0]).read()
    assert tokens == [7, 8, 9, 2, 3, 5, 4]
    assert finite == [True, True, False, True]
    assert counts == [3, 2, 1, 1]
