"""The CPU's and the GPU's kernels propose the drafts that plain Python finds, and append tokens to histories."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from aengine.kernels.ngram.base import NgramKernels
from tests.kernels.ngram.reference import EXAMPLES, GARBAGE, Example, expected_drafts, histories, texts

CAPACITY = 80


@dataclass(frozen=True)
class Implementation:
    kernels: NgramKernels
    device: torch.device


@pytest.fixture(params=["cpu", pytest.param("triton", marks=pytest.mark.gpu, id="triton-tiny")])
def tested(request: pytest.FixtureRequest) -> Implementation:
    """An implementation, and the device of its tensors."""
    if request.param == "cpu":
        return Implementation(importlib.import_module("aengine.kernels.ngram.cpu_ngram"), torch.device("cpu"))
    kernels = pytest.importorskip("aengine.kernels.ngram.triton_ngram")
    return Implementation(kernels, request.getfixturevalue("device"))


@pytest.mark.interpreted(len(EXAMPLES))
@pytest.mark.parametrize("example", [pytest.param(example, id=name) for name, example in EXAMPLES.items()])
def test_the_tokens_after_the_longest_ngrams_latest_occurrence(example: Example, tested: Implementation) -> None:
    history, lengths = histories([example.known], CAPACITY, tested.device)
    rows, count = torch.tensor([0], device=tested.device), len(example.drafts)
    drafts = tested.kernels.match(history, lengths, rows, example.longest, example.shortest, count)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == [example.drafts]


@given(
    batch=st.lists(texts(), min_size=1, max_size=4),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 6),
    drafts=st.integers(1, 9),
    data=st.data(),
)
def test_any_text(
    tested: Implementation, batch: list[list[int]], longest: int, shortest: int, drafts: int, data: st.DataObject
) -> None:
    shortest = min(longest, shortest)
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=6))
    history, lengths = histories(batch, CAPACITY, tested.device)
    rows = torch.tensor(chosen, dtype=torch.int64, device=tested.device)
    found = tested.kernels.match(history, lengths, rows, longest, shortest, drafts)
    assert found.tolist() == [expected_drafts(batch[row], longest, shortest, drafts) for row in chosen]


def test_tokens_beyond_the_length_are_ignored(tested: Implementation) -> None:
    history, lengths = histories([[1, 2, 3, 1, 2], [GARBAGE, 1, 2]], CAPACITY, tested.device)
    history[:, 7:9] = torch.tensor([1, 2], device=tested.device)
    drafts = tested.kernels.match(history, lengths, torch.tensor([0, 1], device=tested.device), 2, 1, 4)
    assert drafts.tolist() == [[3, 1, 2, 3], [-1, -1, -1, -1]]


def test_an_ngram_does_not_reach_before_the_first_token(tested: Implementation) -> None:
    """A token like the n-gram's first stands before the text in memory, and at its end."""
    history, lengths = histories([[], [GARBAGE, 1, GARBAGE, GARBAGE]], CAPACITY, tested.device)
    drafts = tested.kernels.match(history, lengths, torch.tensor([1], device=tested.device), 2, 1, 2)
    assert drafts.tolist() == [[GARBAGE, GARBAGE]]


def test_a_length_beyond_the_capacity_counts_as_the_capacity(tested: Implementation) -> None:
    history, lengths = histories([[1, 2, 3, 1, 2], [9] * 5], 5, tested.device)
    rows = torch.tensor([0], device=tested.device)
    drafts = tested.kernels.match(history, lengths + 2, rows, 3, 1, 2)
    assert drafts.tolist() == [[3, 1]]


def test_rows_are_proposed_for_in_their_order(tested: Implementation) -> None:
    history, lengths = histories([[1, 5, 1], [2, 6, 2], [3, 7, 3]], CAPACITY, tested.device)
    drafts = tested.kernels.match(history, lengths, torch.tensor([2, 0, 2], device=tested.device), 3, 1, 1)
    assert drafts.tolist() == [[7], [5], [7]]


@pytest.mark.parametrize(
    ("longest", "shortest", "drafts", "field"), [(3, 0, 1, "shortest"), (1, 2, 1, "longest"), (2, 1, 0, "drafts")]
)
def test_sizes_out_of_range_are_refused(
    tested: Implementation, longest: int, shortest: int, drafts: int, field: str
) -> None:
    history, lengths = histories([[1, 1]], CAPACITY, tested.device)
    with pytest.raises(ValueError, match=f"^{field}: "):
        tested.kernels.match(history, lengths, torch.tensor([0], device=tested.device), longest, shortest, drafts)


@given(
    batch=st.lists(texts(), min_size=1, max_size=4),
    width=st.integers(0, 5),
    capacity=st.sampled_from([CAPACITY, 75]),  # 75: some of the tokens have no place
    data=st.data(),
)
@example(batch=[[1] * 73, [2]], width=5, capacity=75, data=None)
def test_new_tokens_are_written_at_the_end(
    tested: Implementation, batch: list[list[int]], width: int, capacity: int, data: st.DataObject | None
) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True)) if data else [0]
    counts = [data.draw(st.integers(0, width)) if data else width for _ in chosen]
    history, lengths = histories(batch, capacity, tested.device)
    tokens = torch.arange(100, 100 + len(chosen) * width, device=tested.device).view(len(chosen), width)
    numbers = torch.tensor([chosen, counts], dtype=torch.int64, device=tested.device)
    expected = list(batch)
    for row, new, count in zip(chosen, tokens.tolist(), counts, strict=True):
        expected[row] = (batch[row] + new[:count])[:capacity]
    before = lengths.clone()
    tested.kernels.append(history, lengths, numbers[0], tokens, numbers[1])
    assert torch.equal(history, histories(expected, capacity, tested.device)[0])
    assert torch.equal(lengths, before)


def test_appended_tokens_are_matched(tested: Implementation) -> None:
    history, lengths = histories([[1, 2, 3, 4], [5, 6, 7]], CAPACITY, tested.device)
    rows = torch.tensor([1, 0], device=tested.device)
    tokens = torch.tensor([[5, 9], [1, 2]], device=tested.device)
    counts = torch.tensor([1, 2], device=tested.device)
    tested.kernels.append(history, lengths, rows, tokens, counts)
    lengths[rows] += counts
    assert tested.kernels.match(history, lengths, rows, 2, 1, 2).tolist() == [[6, 7], [3, 4]]
