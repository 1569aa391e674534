"""A row that forks from another gets its whole state except the seed, without another upload of its tokens."""

from __future__ import annotations

import msgspec
import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Sampler
from aengine.step_plan import NewRow
from tests.sampling.build import CPU, draw, new_row

VOCAB = 40
PROMPT = [3, 5, 5, 8, 13]
KINDS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "filtered": SamplingParams(top_k=5, top_p=0.8, min_p=0.05),
    "penalised": SamplingParams(repetition_penalty=1.4, presence_penalty=1.5, frequency_penalty=0.7),
    "biased": SamplingParams(logit_bias={4: 9.0, 7: -50.0}),
    "at least so many": SamplingParams(min_tokens=3),
    "with logprobs": SamplingParams(logprobs=3),
    "everything": SamplingParams(
        top_k=9, repetition_penalty=1.2, logit_bias={2: 3.0}, min_tokens=2, logprobs=1, presence_penalty=0.5
    ),
}


def family(params: SamplingParams, copied: bool) -> list[NewRow]:
    """Return a leader on row 2 and two siblings, as copies or as rows of their own."""
    rows = [
        new_row(row, params, seed=70 + row, stop_ids=(1, 6), prompt=PROMPT, banned=((9,), (11, 12)))
        for row in (2, 0, 4)
    ]
    if copied:
        rows[1:] = [msgspec.structs.replace(new, copy_of=2) for new in rows[1:]]
    return rows


def drawn(copied: bool, params: SamplingParams, *, apart: bool) -> list[list[int]]:
    """Return what the three draw in six steps among other rows. apart: the siblings enter after the leader."""
    sampler = Sampler(6, VOCAB, CPU)
    sampler.set_rows([new_row(row, SamplingParams(logit_bias={0: 1.0}), prompt=[row]) for row in range(6)])
    rows = family(params, copied)
    for entering in [rows[:1], rows[1:]] if apart else [rows]:
        sampler.set_rows(entering)
    noise = torch.Generator().manual_seed(4)
    return [
        draw(sampler, torch.randn(3, VOCAB, generator=noise), [2, 0, 4], [len(PROMPT) + step] * 3).token_ids.tolist()
        for step in range(6)
    ]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_draw_the_same_as_separate_rows(kind: str, apart: bool) -> None:
    assert drawn(True, KINDS[kind], apart=apart) == drawn(False, KINDS[kind], apart=apart)


def test_draws_of_a_copy_are_not_counted_for_its_source() -> None:
    sampler = Sampler(6, VOCAB, CPU)
    sampler.set_rows(family(KINDS["penalised"], copied=True))
    logits = torch.zeros(1, VOCAB)
    logits[0, 20] = 8.0
    assert draw(sampler, logits, [0], [5]).token_ids.tolist() == [20]
    counts = sampler._counts.pick(torch.tensor([2, 0, 4])) >> 1
    assert counts[:, 20].tolist() == [0, 1, 0]
