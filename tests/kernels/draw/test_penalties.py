from __future__ import annotations

import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling.parameters import RowParameters
from aengine.sampling.penalties import TokenCounts, penalize
from tests.sampling.build import new_row

penalties = pytest.importorskip("aengine.kernels.draw.penalties")
pytestmark = pytest.mark.gpu

PARAMS = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, presence_penalty=0.5),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(repetition_penalty=1.1, presence_penalty=-1.5, frequency_penalty=1.9),
]


@pytest.mark.parametrize("vocab", [pytest.param(300, id="tiny"), pytest.param(5000, id="tiny-blocks"), 151_936])
def test_every_bit_equals_the_samplers_formula(vocab: int, device: torch.device) -> None:
    """Only logits of draws with penalties change."""
    torch.manual_seed(0)
    rows = [
        new_row(
            row,
            PARAMS[row % len(PARAMS)],
            prompt=torch.randint(vocab, (40,)).tolist(),
            output=torch.randint(vocab // 2, (90,)).tolist() + [7] * row,
        )
        for row in range(9)
    ]
    parameters, counts = RowParameters(9, vocab, device), TokenCounts(9, vocab, device)
    parameters.set_rows(rows)
    counts.set_rows(rows)
    counts.add(torch.tensor([3, 8], device=device), torch.tensor([vocab - 1, 5], device=device))
    row_index = torch.tensor([8, 3, 1, 0, 6, 2, 7], device=device)
    draws = torch.tensor([6, 0, 1, 2, 5], device=device)
    logits = torch.randn(7, vocab, device=device) * 4
    logits[:, 7] = -torch.inf
    logits[0, :20] = torch.tensor([0.0, -0.0] * 10, device=device)
    expected = logits.clone()
    chosen = row_index[draws]
    expected[draws] = penalize(logits[draws], counts.pick(chosen), parameters.pick(chosen))
    picked = parameters.pick(row_index)
    columns = (picked.repetition[:, 0], picked.presence[:, 0], picked.frequency[:, 0])
    penalties.penalize_seen(logits, draws, row_index, counts.cells, *columns)
    assert torch.equal(logits, expected)
    assert int((counts.pick(chosen) > 3).sum()) >= 4  # at least 7 times in the output


def test_without_draws_nothing_happens_tiny(device: torch.device) -> None:
    logits = torch.randn(2, 50, device=device)
    before, nobody = logits.clone(), torch.empty(0, dtype=torch.int64, device=device)
    cells = torch.ones(2, 50, dtype=torch.int32, device=device)
    penalties.penalize_seen(logits, nobody, torch.arange(2, device=device), cells, *torch.ones(3, 2, device=device))
    assert torch.equal(logits, before)
