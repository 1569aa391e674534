"""The first and the last kernel of a captured step of decodes, against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.kernels.decodes import torch_decodes
from aengine.kernels.decodes.base import DecodeKernels

triton_decodes = pytest.importorskip("aengine.kernels.decodes.triton_decodes")
PAGE, PADDING, TURNS = 16, 9, 4
KINDS = [
    pytest.param(torch_decodes, id="torch"),
    pytest.param(triton_decodes, id="triton-tiny", marks=pytest.mark.gpu),
]


@pytest.fixture
def place(kernels: DecodeKernels, request: pytest.FixtureRequest) -> torch.device:
    """Return the CPU for the reference, and the device of kernels for others."""
    if kernels is torch_decodes:
        return torch.device("cpu")
    device: torch.device = request.getfixturevalue("device")
    return device


def rows_of(width: int, place: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next tokens, lengths and pages of ten rows."""
    next_tokens = torch.randint(0, 1000, (6, 10), device=place)
    length = torch.randint(0, (width - 1) * PAGE, (10,), device=place)
    length[PADDING] = 0
    table = torch.randint(1, 5000, (10, width), dtype=torch.int32, device=place)
    table[PADDING] = 0
    return next_tokens, length, table


@pytest.mark.parametrize("kernels", KINDS)
def test_a_row_computes_its_last_token_and_its_drafts(kernels: DecodeKernels, place: torch.device) -> None:
    next_tokens, length, table = rows_of(3, place)
    length[4], length[0] = 13, 47
    turn = torch.tensor([3], device=place)
    index, drafts = torch.tensor([4, 0], device=place), torch.tensor([3, 0], device=place)
    inputs = kernels.begin(index, drafts, 4, next_tokens, length, table, PAGE, PADDING, turn, TURNS)
    pages = table[4, :2].tolist()
    assert inputs.token_rows.tolist() == [4] * 4 + [0] * 4
    assert inputs.token_ids.tolist() == next_tokens[:4, 4].tolist() + next_tokens[:4, 0].tolist()
    # The second row is at the end of its last page. Its padding repeats its last position, and goes to page 0.
    assert inputs.positions.tolist() == [13, 14, 15, 16, 47, 47, 47, 47]
    assert inputs.next_positions.tolist() == [14, 15, 16, 17, 48, 48, 48, 48]
    in_pages = [*(pages[0] * PAGE + offset for offset in (13, 14, 15)), pages[1] * PAGE]
    assert inputs.slots.tolist() == [*in_pages, int(table[0, 2]) * PAGE + 15, 0, 1, 2]
    assert inputs.seq_lens.tolist() == [17, 51]
    assert inputs.page_table.shape == (2, 4)
    assert inputs.page_table[0, :2].tolist() == pages
    assert inputs.page_table[1].tolist() == [*table[0].tolist(), 0]
    assert length[[4, 0]].tolist() == [17, 48]
    assert turn.tolist() == [0]


@pytest.mark.parametrize("kernels", KINDS)
def test_drafts_are_kept_up_to_the_first_that_differs_from_its_draw(
    kernels: DecodeKernels, place: torch.device
) -> None:
    next_tokens, length, _ = rows_of(3, place)
    next_tokens[1:4, [4, 0, 2, 7]] = torch.tensor([[11, 12, 13]] * 4, device=place).T
    length[:] = torch.arange(20, 30, device=place)
    length[PADDING] = 0
    index = torch.tensor([4, 0, 2, 7, PADDING], device=place)
    drafts = torch.tensor([3, 3, 1, 3, 0], device=place)
    drawn = torch.tensor([11, 12, 13, 14, 11, 99, 13, 14, 11, 12, 13, 14, 98, 12, 13, 14, 1, 2, 3, 4], device=place)
    finite = torch.ones(20, dtype=torch.bool, device=place)
    finite[[6, 12]] = False  # a draw after a refused draft, and a draw that is kept
    written = torch.zeros((TURNS, 6, 7), dtype=torch.int64, pin_memory=place.type == "cuda")
    before = next_tokens.clone()
    turn = torch.tensor([2], device=place)
    verdict = kernels.end(index, drafts, drawn, finite, next_tokens, length, written, turn, PADDING)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    assert verdict.counts.tolist() == [4, 2, 2, 1, 0]
    assert verdict.places[:4].tolist() == [3, 5, 9, 12]
    assert next_tokens[0, [4, 0, 2, 7]].tolist() == [14, 99, 12, 98]
    assert length[[4, 0, 2, 7, PADDING]].tolist() == [24, 20 - 2, 22, 27 - 3, 0]
    before[0, [4, 0, 2, 7]] = next_tokens[0, [4, 0, 2, 7]]
    assert torch.equal(next_tokens, before)
    assert written[2, :4, :4].tolist() == drawn[:16].view(4, 4).tolist()
    assert written[2, :4, -1].tolist() == [0, 2, 0, ~3]
    assert not written[[0, 1, 3]].any()
    assert not written[2, 4:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [pytest.param(3, id="tiny"), 3000])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 6])
def test_kernels_agree_with_the_reference(windowed: bool, width: int, queries: int, device: torch.device) -> None:
    next_tokens, length, table = rows_of(width, device)
    next_tokens = next_tokens[:queries]  # without speculation, rows have no drafts
    windows = torch.randint(1, 5000, table.shape, dtype=torch.int32, device=device) if windowed else None
    index = torch.tensor([4, 0, PADDING, 7, PADDING], device=device)
    drafts = torch.tensor([queries - 1, 0, 0, min(1, queries - 1), 0], device=device)
    drawn = torch.randint(0, 3, (5 * queries,), device=device)
    finite = torch.rand(5 * queries, device=device) < 0.8
    next_tokens %= 3  # some drafts are right
    found = []
    for kernels in (torch_decodes, triton_decodes):
        tokens = next_tokens.clone()
        lengths, turn = length.clone(), torch.tensor([1], device=device)
        inputs = kernels.begin(index, drafts, queries, next_tokens, lengths, table, PAGE, PADDING, turn, TURNS, windows)
        again = kernels.begin(
            index,
            drafts,
            queries,
            next_tokens,
            length.clone(),
            table,
            PAGE,
            PADDING,
            turn.clone(),
            TURNS,
            windows,
            inputs,
        )
        assert again is inputs
        for nth, end in enumerate(inputs.seq_lens.tolist()):  # later entries are undefined
            for pages in (inputs.page_table, inputs.window_table):
                if pages is not None:
                    pages[nth, -(-end // PAGE) :] = 0
        fields = [getattr(inputs, name) for name in inputs.__slots__]
        # A kernel writes to the host's memory. Operations of torch write only where their indices are.
        on_host = {"pin_memory": device.type == "cuda"} if kernels is triton_decodes else {"device": device}
        written = torch.zeros((TURNS, 5, queries + 1), dtype=torch.int64, **on_host)
        verdict = kernels.end(index, drafts, drawn, finite, tokens, lengths, written, turn, PADDING)
        kept = [written[2].to(device), tokens, verdict.counts[index != PADDING], verdict.places[index != PADDING]]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append([lengths, turn, *kept, *(field for field in fields if field is not None)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
