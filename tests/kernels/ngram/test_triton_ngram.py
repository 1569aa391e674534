"""N-gram drafts from histories of many blocks, without host syncs, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.ngram.reference import expected_drafts, histories

triton_ngram = pytest.importorskip("aengine.kernels.ngram.triton_ngram")
pytestmark = pytest.mark.gpu


def random_texts(lengths: list[int], tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(tokens, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.interpreted(4)
@pytest.mark.parametrize(
    ("capacity", "rows"),
    [pytest.param(5000, 3, id="tiny"), pytest.param(5001, 20, id="tiny-odd"), (40_960, 2), (262_144, 1), (3000, 700)],
)
@pytest.mark.parametrize("tokens", [4, 30])
def test_histories_of_many_blocks(capacity: int, rows: int, tokens: int, device: torch.device) -> None:
    lengths = [capacity - (row * capacity // rows) - row % 2 for row in range(rows)]
    texts = random_texts(lengths, tokens)
    history, known = histories(texts, capacity, device)
    drafts = triton_ngram.match(history, known, torch.arange(rows, device=device), 8, 2, 5)
    assert drafts.tolist() == [expected_drafts(text, 8, 2, 5) for text in texts]


@pytest.mark.parametrize("end", [0, 1022, 1023, 1024, 1025, 2047, 2048, 3997, 3998])
def test_an_ngram_anywhere_is_found_tiny(end: int, device: torch.device) -> None:
    """The n-gram ends at the borders of blocks, at the start or at the end of the history."""
    text = list(range(10, 4010))
    text[max(end - 1, 0) : end + 1] = [7, 8][-(end + 1) :]
    text[-2:] = [7, 8] if end < 3998 else [8, 8]
    history, known = histories([text], 4000, device)
    drafts = triton_ngram.match(history, known, torch.tensor([0], device=device), 3, 1, 4)
    assert drafts.tolist() == [expected_drafts(text, 3, 1, 4)]
    assert drafts[0, 0] == text[end + 1]


def test_a_captured_graph_follows_its_tensors_without_a_host_sync(device: torch.device) -> None:
    texts = random_texts([1900, 0, 30], 5)
    history, lengths = histories(texts, 2000, device)
    rows, counts = torch.tensor([2, 0], device=device), torch.tensor([3, 1], device=device)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)

    def step() -> Tensor:
        triton_ngram.append(history, lengths, rows, tokens, counts)
        lengths.index_add_(0, rows, counts)
        drafts: Tensor = triton_ngram.match(history, lengths, rows, 4, 1, 6)
        return drafts

    before = history.clone(), lengths.clone()
    step()  # compiles
    history.copy_(before[0])
    lengths.copy_(before[1])
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = step()
    for new in ([[1, 2, 3], [4, 0, 0]], [[0, 0, 0], [2, 1, 1]], [[3, 3, 4], [0, 2, 2]]):
        tokens.copy_(torch.tensor(new))
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        eager = triton_ngram.match(history, lengths, rows, 4, 1, 6)
        torch.cuda.set_sync_debug_mode("default")
        texts[2] += new[0]
        texts[0] += new[1][:1]
        expected = [expected_drafts(texts[row], 4, 1, 6) for row in (2, 0)]
        assert drafts.tolist() == eager.tolist() == expected
