"""Random mixes of parameters: every draw equals the definition's, in any batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.sampling import DrawLogprobs, Kind, Sampler
from tests.sampling import reference
from tests.sampling.build import CPU, draw, draw_many, new_row
from tests.sampling.kinds import KINDS, VOCAB

MAX_ROWS = 8
token_ids = st.integers(0, VOCAB - 1)


def off_or(off: float, values: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.one_of(st.just(off), values)


params = st.builds(
    SamplingParams,
    temperature=off_or(0, st.floats(0.05, 2)),
    top_k=st.one_of(st.sampled_from([0, -1, 1, VOCAB, VOCAB + 9]), st.integers(2, VOCAB)),
    top_p=off_or(1, st.floats(0.01, 1)),
    min_p=off_or(0, st.floats(0, 1)),
    repetition_penalty=off_or(1, st.floats(0.3, 3)),
    presence_penalty=off_or(0, st.floats(-2, 2)),
    frequency_penalty=off_or(0, st.floats(-2, 2)),
    logit_bias=st.one_of(st.just({}), st.dictionaries(token_ids, st.floats(-100, 100), max_size=5)),
    min_tokens=st.integers(0, 6),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
)


@dataclass
class Case:
    params: SamplingParams
    seed: int
    prompt: list[int]
    output: list[int]
    stop_ids: tuple[int, ...]
    logits_seed: int
    style: str
    drawn: list[int] = field(default_factory=list)

    def logits(self, step: int) -> torch.Tensor:
        x = np.random.default_rng([self.logits_seed, step]).normal(scale=3, size=VOCAB).astype(np.float32)
        tensor = torch.from_numpy(x)
        if self.style == "with equals":
            tensor = tensor.round()
        if self.style == "with -inf":
            tensor[torch.from_numpy(x) < 0] = -torch.inf
        return tensor


cases = st.builds(
    Case,
    params=params,
    seed=st.integers(-(2**63), 2**64 - 1),
    prompt=st.lists(token_ids, min_size=1, max_size=6),
    output=st.lists(token_ids, max_size=4),
    stop_ids=st.lists(token_ids, max_size=3).map(tuple),
    logits_seed=st.integers(0, 2**32 - 1),
    style=st.sampled_from(["plain", "with equals", "with -inf"]),
)


def run(batch: list[tuple[int, Case]], steps: int) -> list[list[tuple[int, DrawLogprobs | None]]]:
    """Draw `steps` tokens for cases on given rows of one sampler. Return ids and logprobs of each step and case."""
    sampler = Sampler(MAX_ROWS, VOCAB, CPU)
    sampler.set_rows(
        [
            new_row(row, case.params, seed=case.seed, stop_ids=case.stop_ids, prompt=case.prompt, output=case.output)
            for row, case in batch
        ]
    )
    rows = [row for row, _ in batch]
    results = []
    for step in range(steps):
        logits = torch.stack([case.logits(step) for _, case in batch])
        draws = draw(sampler, logits, rows, [len(case.prompt) + len(case.output) + step for _, case in batch])
        assert draws.finite.all()
        lines: list[DrawLogprobs | None] = [None] * len(rows)
        if draws.logprobs is not None:
            lines = [
                DrawLogprobs(*line) for line in zip(draws.logprobs.sampled, draws.logprobs.top_ids, draws.logprobs.top)
            ]
        results.append(list(zip(draws.token_ids.tolist(), lines)))
    return results


@given(st.lists(cases, min_size=1, max_size=MAX_ROWS), st.permutations(range(MAX_ROWS)))
def test_a_batch_draws_the_same_as_the_definition_and_as_each_row_alone(batch: list[Case], slots: list[int]) -> None:
    together = run(list(zip(slots, batch)), steps=3)
    for i, case in enumerate(batch):
        alone = run([(0, case)], steps=3)
        known = list(case.output)
        for step in range(3):
            token_id, logprobs = together[step][i]
            assert token_id == alone[step][0][0]
            expected = reference.sample(
                case.logits(step).tolist(),
                case.params,
                case.seed,
                len(case.prompt) + len(known),
                case.prompt,
                known,
                case.stop_ids,
            )
            if expected.clear:
                assert token_id == expected.token_id
            known.append(token_id)

            k = case.params.logprobs
            if k is None:
                assert alone[step][0][1] is None
                continue
            mine = alone[step][0][1]
            assert mine is not None
            assert logprobs is not None
            assert torch.equal(logprobs.sampled, mine.sampled)
            assert torch.equal(logprobs.top_ids[:k], mine.top_ids)
            assert torch.equal(logprobs.top[:k], mine.top)
            np.testing.assert_allclose(float(mine.sampled), expected.logprobs[token_id], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(mine.top, np.sort(expected.logprobs)[::-1][:k], rtol=1e-5, atol=1e-5)


def test_the_definition_is_rarely_too_close_to_call() -> None:
    """Otherwise the test above would check nothing."""
    rng = np.random.default_rng(0)
    clear = 0
    for i in range(300):
        mix = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2)
        clear += reference.sample(rng.normal(scale=3, size=VOCAB), mix, i, 5, [1, 2], [3, 4, 5], ()).clear
    assert clear > 280


# ---- seeds and rows ---------------------------------------------------------------------------------------


def test_a_seed_fixes_the_ids_in_any_row_and_batch() -> None:
    """A seeded request among 31 others of every kind moves to another row at each step."""
    torch.manual_seed(0)
    steps = torch.randn(20, VOCAB) * 2
    seeded = SamplingParams(temperature=0.9, top_p=0.95)
    others = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.5, top_k=3, logprobs=5),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, min_p=0.1),
        SamplingParams(temperature=1, logit_bias={3: 5.0}, min_tokens=9),
    ]
    alone = Sampler(1, VOCAB, CPU)
    alone.set_rows([new_row(0, seeded, seed=1234)])
    crowd = Sampler(32, VOCAB, CPU)
    for step, logits in enumerate(steps):
        mine = (7 * step) % 32
        crowd.set_rows(
            [
                new_row(row, seeded if row == mine else others[row % 5], seed=1234 if row == mine else row)
                for row in range(32)
            ]
        )
        batch = torch.randn(32, VOCAB)
        batch[31 - mine] = logits
        rows = list(range(31, -1, -1))
        expected = draw(alone, logits[None], [0], [1 + step]).token_ids
        assert draw(crowd, batch, rows, [1 + step] * 32).token_ids[31 - mine] == expected[0]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**32, 2**64 - 1])
def test_any_64_bit_seed_is_a_seed_of_its_own(seed: int) -> None:
    flat = [0.0] * 1000
    ids = draw_many(flat, 200, seed=seed)
    assert ids == draw_many(flat, 200, seed=seed)
    assert ids != draw_many(flat, 200, seed=0)
    assert ids != draw_many(flat, 200, seed=seed ^ 1)
    assert ids != draw_many(flat, 200, seed=seed ^ 1 << 40)
    assert len(set(ids)) > 150


def test_a_seed_and_its_64_bit_complement_are_the_same_bits() -> None:
    assert draw_many([0.0] * 100, 50, seed=-1) == draw_many([0.0] * 100, 50, seed=2**64 - 1)


def test_a_row_forgets_its_former_request() -> None:
    sampler = Sampler(2, 4, CPU)
    everything = SamplingParams(
        temperature=1.5,
        top_k=2,
        top_p=0.5,
        min_p=0.2,
        logit_bias={3: -100.0},
        repetition_penalty=2.0,
        frequency_penalty=2.0,
        min_tokens=50,
        logprobs=3,
    )
    sampler.set_rows([new_row(1, everything, stop_ids=(2,), prompt=[3], output=[3, 3])])
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    draw(sampler, logits, [1], [3])
    sampler.set_rows([new_row(1, SamplingParams(temperature=0))])
    draws = draw(sampler, logits, [1], [1])
    assert (draws.token_ids.tolist(), draws.logprobs) == ([3], None)
    sampler.set_rows([new_row(1, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=[0])])
    assert draw(sampler, logits, [1], [1]).token_ids.tolist() == [3], "the former owner's tokens still count"


def test_siblings_draw_different_tokens_from_the_same_logits() -> None:
    """They have the same logits and different seeds."""
    sampler = Sampler(64, 100, CPU)
    sampler.set_rows([new_row(row, SamplingParams(), seed=row) for row in range(64)])
    ids = draw(sampler, torch.zeros(1, 100).repeat(64, 1), list(range(64)), [1] * 64).token_ids
    assert len(ids.unique()) > 30


def test_the_caller_may_reuse_its_list_of_rows() -> None:
    sampler = Sampler(2, 3, CPU)
    sampler.set_rows(
        [new_row(0, SamplingParams(temperature=0)), new_row(1, SamplingParams(top_k=1, logit_bias={2: 9.0}))]
    )
    rows, logits = [0], torch.tensor([[1.0, 0.0, 0.0]])
    assert draw(sampler, logits, rows, [1]).token_ids.tolist() == [0]
    rows[0] = 1
    assert draw(sampler, logits, rows, [1]).token_ids.tolist() == [2]


def test_a_step_without_draws_is_fine() -> None:
    sampler = Sampler(2, 5, CPU)
    draws = draw(sampler, torch.zeros(0, 5), [], [])
    assert draws.token_ids.shape == draws.finite.shape == (0,)
    assert draws.token_ids.dtype == torch.int64


def test_a_batch_too_large_for_one_block_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.8, repetition_penalty=1.5),
        SamplingParams(temperature=0.8, min_p=0.1, logprobs=4),
        SamplingParams(temperature=0),
    ]
    torch.manual_seed(1)
    logits = torch.randn(16, VOCAB)

    def results(options: list[SamplingParams]) -> list[Any]:
        sampler = Sampler(16, VOCAB, CPU)
        sampler.set_rows([new_row(row, options[row % len(options)], seed=row, prompt=[1, 2]) for row in range(16)])
        draws = draw(sampler, logits, list(range(16)), [2] * 16)
        logprobs = draws.logprobs or DrawLogprobs(torch.empty(0), torch.empty(0), torch.empty(0))
        return [draws.token_ids.tolist(), logprobs.sampled.tolist(), logprobs.top.tolist(), logprobs.top_ids.tolist()]

    for options in (mixed, mixed[:1], mixed[1:2], mixed[2:3]):
        whole = results(options)
        with monkeypatch.context() as patch:
            patch.setattr("aengine.sampling.groups._BLOCK_CELLS", 3 * VOCAB)
            assert results(options) == whole


# ---- draws with fixed shapes ------------------------------------------------------------------------------


def test_the_kind_of_a_batch_is_that_of_its_most_demanding_row() -> None:
    simple = [
        SamplingParams(temperature=0, top_p=0.5, min_p=0.5),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=1),
        SamplingParams(top_k=VOCAB),
    ]
    filtered = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.6, top_k=5, top_p=0.9, min_p=0.01),
    ]
    others = [
        SamplingParams(temperature=0, logit_bias={1: 1.0}),
        SamplingParams(temperature=0, min_tokens=1),
        SamplingParams(temperature=0, presence_penalty=0.1),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(top_k=2, logprobs=1),
        SamplingParams(temperature=0, structured=Structured(choice=("a", "b"))),
    ]
    sampler = Sampler(15, VOCAB, CPU)
    sampler.set_rows([new_row(row, params) for row, params in enumerate(simple + filtered + others)])
    sampler.set_rows([new_row(14, SamplingParams(temperature=0), banned=[(1, 2)])])
    assert sampler.kind([]) is Kind.SIMPLE
    assert sampler.kind([0, 1, 2, 3]) is Kind.SIMPLE
    assert all(sampler.kind([row, 0]) is Kind.FILTERED for row in range(4, 8))
    assert all(sampler.kind([5, row, 1]) is Kind.ANY for row in range(8, 15))
    assert sampler.kind([3, 0]) is Kind.SIMPLE
    assert all(sampler.kind([0, row]) is not Kind.SIMPLE for row in range(4, 15))


def test_filtered_rows_draw_the_same_in_both_ways() -> None:
    kinds = [
        SamplingParams(temperature=0, top_k=4),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=1, min_p=0.2),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8, temperature=1.4),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=5, top_p=0.7, min_p=0.1, temperature=0.6),
    ]
    sampler = Sampler(35, VOCAB, CPU)
    sampler.set_rows([new_row(row, kinds[row % 7], seed=row) for row in range(35)])
    torch.manual_seed(5)
    rows = list(range(34, -1, -1))
    for step in range(10):
        logits = (torch.randn(35, VOCAB) * 2).round()
        logits[5, 3] = torch.nan
        filtered = sampler.draw_filtered(logits, torch.tensor(rows), torch.full((35,), 1 + step))
        usual = draw(sampler, logits, rows, [1 + step] * 35)
        healthy = usual.finite
        assert torch.equal(filtered.token_ids[healthy], usual.token_ids[healthy])
        assert torch.equal(filtered.finite, usual.finite)


def test_simple_rows_draw_the_same_in_both_ways() -> None:
    """A replayed graph and a step without a graph must draw the same."""
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=0.7), SamplingParams(top_k=1), SamplingParams()]
    sampler = Sampler(32, VOCAB, CPU)
    sampler.set_rows([new_row(row, kinds[row % 4], seed=row) for row in range(32)])
    torch.manual_seed(4)
    rows = list(range(31, -1, -1))
    for step in range(10):
        logits = (torch.randn(32, VOCAB) * 2).round()
        logits[5, 3] = torch.nan
        simple = sampler.draw_simple(logits, torch.tensor(rows), torch.full((32,), 1 + step))
        usual = draw(sampler, logits, rows, [1 + step] * 32)
        healthy = usual.finite
        assert torch.equal(simple.token_ids[healthy], usual.token_ids[healthy])
        assert torch.equal(simple.finite, usual.finite)


# ---- rows that are not finite -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "nothing finite"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_non_finite_row_is_flagged_and_its_neighbours_are_untouched(kind: SamplingParams, bad: float | str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 8)
    broken = logits.clone()
    if isinstance(bad, str):
        broken[1] = -torch.inf
    else:
        broken[1, 5] = bad

    def sampler() -> Sampler:
        sampler = Sampler(3, 8, CPU)
        sampler.set_rows([new_row(row, kind, seed=row) for row in range(3)])
        return sampler

    draws = draw(sampler(), broken, [0, 1, 2], [1, 1, 1])
    healthy = draw(sampler(), logits, [0, 1, 2], [1, 1, 1])
    assert draws.finite.tolist() == [True, False, True]
    assert draws.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    assert 0 <= int(draws.token_ids[1]) < 8, "even a broken row's id is fed to the next step"


def test_minus_infinity_alone_is_legal() -> None:
    sampler = Sampler(1, 3, CPU)
    for kind in KINDS:
        sampler.set_rows([new_row(0, kind)])
        draws = draw(sampler, torch.tensor([[-torch.inf, 1.0, -torch.inf]]), [0], [1])
        assert (draws.finite.tolist(), draws.token_ids.tolist()) == ([True], [1])
