"""Logprobs are of the raw distribution, for rows that request them."""

from __future__ import annotations

import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Sampler
from tests.sampling.build import CPU, draw, new_row


def test_logprobs_are_raw_with_any_other_parameters() -> None:
    sampler = Sampler(1, 6, CPU)
    params = SamplingParams(
        temperature=0.3,
        top_k=2,
        logit_bias={5: 50.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
        min_tokens=3,
        logprobs=3,
    )
    sampler.set_rows([new_row(0, params, stop_ids=(4,), prompt=[1], output=[2])])
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0, 4.0, -1.0]])
    draws = draw(sampler, logits, [0], [2])
    expected = logits.log_softmax(-1)[0]
    assert draws.token_ids.tolist() == [5]
    assert draws.logprobs is not None
    assert torch.equal(draws.logprobs.sampled, expected[5:6])
    assert draws.logprobs.top_ids.tolist() == [[4, 2, 3]]
    assert torch.equal(draws.logprobs.top, expected[[4, 2, 3]][None])


def test_the_twenty_likeliest_come_likeliest_first() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 1000)
    sampler = Sampler(4, 1000, CPU)
    sampler.set_rows([new_row(row, SamplingParams(temperature=0, logprobs=20)) for row in range(4)])
    draws = draw(sampler, logits, [3, 1, 0, 2], [1] * 4)
    assert draws.logprobs is not None
    everything = logits.log_softmax(-1).sort(dim=-1, descending=True)
    assert torch.equal(draws.logprobs.top, everything.values[:, :20])
    assert torch.equal(draws.logprobs.top_ids, everything.indices[:, :20])
    assert torch.equal(draws.logprobs.sampled, everything.values[:, 0])


def test_k_is_the_most_that_any_row_of_the_batch_requests() -> None:
    sampler = Sampler(4, 50, CPU)
    for row, k in enumerate((None, 0, 2, 7)):
        sampler.set_rows([new_row(row, SamplingParams(logprobs=k))])

    def widths(rows: list[int]) -> tuple[int, ...] | None:
        logprobs = draw(sampler, torch.randn(len(rows), 50), rows, [1] * len(rows)).logprobs
        return None if logprobs is None else tuple(logprobs.top.shape)

    assert widths([0]) is None
    assert widths([1]) == (1, 0)
    assert widths([0, 1]) == (2, 0)
    assert widths([2, 1, 0]) == (3, 2)
    assert widths([0, 1, 2, 3]) == (4, 7)


def test_rows_without_logprobs_get_zeros() -> None:
    sampler = Sampler(2, 5, CPU)
    sampler.set_rows([new_row(0, SamplingParams()), new_row(1, SamplingParams(logprobs=2))])
    logprobs = draw(sampler, torch.randn(2, 5), [0, 1], [1, 1]).logprobs
    assert logprobs is not None
    assert (logprobs.sampled[0], logprobs.top[0].tolist(), logprobs.top_ids[0].tolist()) == (0, [0, 0], [0, 0])
    assert logprobs.sampled[1] < 0


def test_which_of_several_equals_make_the_cut_does_not_depend_on_the_others() -> None:
    logits = torch.zeros(2, 100)
    sampler = Sampler(2, 100, CPU)
    sampler.set_rows([new_row(0, SamplingParams(logprobs=3)), new_row(1, SamplingParams(logprobs=17))])
    alone = draw(sampler, logits[:1], [0], [1]).logprobs
    together = draw(sampler, logits, [0, 1], [1, 1]).logprobs
    assert alone is not None
    assert together is not None
    assert torch.equal(alone.top_ids[0], together.top_ids[0, :3])


def test_a_vocabulary_smaller_than_k_gives_all_of_it() -> None:
    sampler = Sampler(1, 4, CPU)
    sampler.set_rows([new_row(0, SamplingParams(logprobs=20))])
    logprobs = draw(sampler, torch.tensor([[0.0, 3.0, 1.0, 2.0]]), [0], [1]).logprobs
    assert logprobs is not None
    assert logprobs.top_ids.tolist() == [[1, 3, 2, 0]]
