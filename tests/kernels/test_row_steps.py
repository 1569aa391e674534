from __future__ import annotations

import pytest
import torch

from aengine.runtime.step.written import WrittenDraws

row_steps = pytest.importorskip("aengine.kernels.row_steps")
pytestmark = pytest.mark.gpu

PAGE, PADDING = 16, 9


@pytest.mark.parametrize("width", [pytest.param(3, id="tiny"), 3000])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_step_gathers_its_rows_inputs(windowed: bool, width: int, device: torch.device) -> None:
    index = torch.tensor([4, 0, PADDING, 7, PADDING], device=device)
    last_token = torch.arange(100, 110, device=device)
    length = torch.randint(0, width * PAGE, (10,), device=device)
    length[4], length[0], length[PADDING] = width * PAGE - 1, 16, 0
    table = torch.randint(1, 5000, (10, width), dtype=torch.int32, device=device)

    windows = torch.randint(1, 5000, (10, width), dtype=torch.int32, device=device) if windowed else None
    before = length.clone()
    held = length[index]

    inputs = row_steps.begin_decode(index, last_token, length, table, PAGE, PADDING, windows)

    before[[4, 0, 7]] += 1
    assert torch.equal(length, before)  # each row except padding is one token longer
    assert torch.equal(inputs.token_ids, last_token[index])
    assert torch.equal(inputs.positions, held)
    assert torch.equal(inputs.slots, table[index, held // PAGE].long() * PAGE + held % PAGE)
    assert torch.equal(inputs.seq_lens, held.int() + 1)
    assert torch.equal(inputs.next_positions, held + 1)
    for place, (row, tokens) in enumerate(zip(index.tolist(), held.tolist(), strict=True)):
        pages = tokens // PAGE + 1
        assert torch.equal(inputs.page_table[place, :pages], table[row, :pages])
        if windows is not None:
            assert torch.equal(inputs.window_table[place, :pages], windows[row, :pages])
    if windows is None:
        assert inputs.window_table is inputs.window_slots is None
    else:
        assert torch.equal(inputs.window_slots, windows[index, held // PAGE].long() * PAGE + held % PAGE)


def test_a_step_stores_the_draws_of_all_rows_but_padding_tiny(device: torch.device) -> None:
    index = torch.tensor([4, 0, PADDING, PADDING], device=device)
    token_ids = torch.tensor([11, 12, 13, 14], device=device)
    finite = torch.tensor([True, False, True, False], device=device)
    last_token = torch.arange(100, 110, device=device)
    length = torch.arange(10, 20, device=device)
    drawn = torch.zeros(10, 4, dtype=torch.int64, pin_memory=device.type == "cuda")
    row_steps.end_decode(index, token_ids, finite, last_token, length, drawn, PADDING)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert last_token.tolist() == [12, 101, 102, 103, 11, 105, 106, 107, 108, 109]
    assert length.tolist() == list(range(10, 20))
    assert drawn.nonzero().tolist() == [[0, 10 % 4], [4, 14 % 4]]
    assert WrittenDraws(drawn, [4 * 4 + 14 % 4, 10 % 4]).read() == ([11, 12], [True, False], [])
