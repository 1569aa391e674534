"""Grammar masks: only tokens with a set bit can be drawn, and only structured draws are masked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.sampling import Sampler
from aengine.sampling.masks import allow_only
from tests.sampling.build import CPU, new_row

FREE = SamplingParams(temperature=0)
BOUND = SamplingParams(temperature=0, structured=Structured(regex="a"))


def bits_of(allowed: list[set[int]], vocab_size: int) -> NDArray[np.int32]:
    """Return masks that allow the given tokens, [rows, words]."""
    masks = np.zeros((len(allowed), -(-vocab_size // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            masks[row, token // 32] |= np.uint32(1 << token % 32)
    return masks.view(np.int32)


def sample(logits: torch.Tensor, params: list[SamplingParams], masks: NDArray[np.int32] | None) -> list[int]:
    rows = list(range(len(params)))
    sampler = Sampler(len(rows), logits.shape[1], CPU)
    sampler.set_rows([new_row(row, own, stop_ids=(2,)) for row, own in enumerate(params)])
    index = torch.tensor(rows)
    return sampler.sample(logits.clone(), rows, index, index + 1, masks).token_ids.tolist()


@given(st.integers(1, 130), st.data())
def test_every_bit_is_its_token(vocab_size: int, data: st.DataObject) -> None:
    allowed = data.draw(st.lists(st.sets(st.integers(0, vocab_size - 1), min_size=1), min_size=1, max_size=4))
    logits = torch.arange(len(allowed) * vocab_size, dtype=torch.float32).view(len(allowed), vocab_size)
    masked = allow_only(logits, torch.from_numpy(bits_of(allowed, vocab_size)))
    for row, tokens in enumerate(allowed):
        for token in range(vocab_size):
            assert masked[row, token] == (logits[row, token] if token in tokens else -torch.inf)


def test_only_structured_draws_are_masked() -> None:
    logits = torch.zeros(4, 70)
    logits[:, 5] = 9.0
    masks = bits_of([{3}, {69, 4}], 70)
    logits[3, 69] = 1.0
    assert sample(logits, [FREE, BOUND, FREE, BOUND], masks) == [5, 3, 5, 69]


def test_without_masks_nothing_is_masked() -> None:
    logits = torch.zeros(2, 70)
    logits[:, 5] = 9.0
    assert sample(logits, [FREE, BOUND], None) == [5, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_come_after_bias_and_penalties(temperature: float) -> None:
    logits = torch.zeros(1, 40)
    params = SamplingParams(
        temperature=temperature,
        seed=1,
        logit_bias={7: 100.0, 8: -100.0},
        presence_penalty=2.0,
        top_p=0.9,
        structured=Structured(regex="a"),
    )
    assert sample(logits, [params], bits_of([{8}], 40)) == [8]


def test_a_token_that_the_grammar_forces_is_drawn_even_if_other_masks_forbid_it() -> None:
    logits = torch.full((1, 40), 0.0)
    params = SamplingParams(temperature=0, min_tokens=30, structured=Structured(regex="a"))  # masks token 2
    assert sample(logits, [params], bits_of([{2}], 40)) == [2]
    assert sample(logits, [params], bits_of([{2, 9}], 40)) == [9]
    logits[0, 30] = -torch.inf
    assert sample(logits, [BOUND], bits_of([{30}], 40)) == [30]


def test_more_rows_than_a_block_holds() -> None:
    """Blocks have 2**23 cells: 55 rows of 152,000."""
    logits = torch.zeros(60, 152_000)
    allowed = [{row * 2500 + 7} for row in range(60)]
    assert sample(logits, [BOUND] * 60, bits_of(allowed, 152_000)) == [token for (token,) in allowed]
