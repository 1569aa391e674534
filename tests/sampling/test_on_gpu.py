"""The same sampler on a CUDA device: the same ids, no waiting, and stages that CUDA graphs can hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aengine.sampling import Draws, Sampler
from aengine.sampling.draw import Noise, draw_filtered, draw_greedy, draw_plain
from aengine.sampling.noise import gumbel, hash32, row_keys, token_codes
from aengine.types import NewRow, SamplingParams
from tests.sampling.build import new_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 151_936
ROWS = 64
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, min_p=0.05, logprobs=3),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0, logit_bias={7: 4.0, 9: -100.0}, min_tokens=5, logprobs=20),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any call that makes the host wait for the device raises while this is on."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def new_rows() -> list[NewRow]:
    return [
        new_row(row, KINDS[row % len(KINDS)], seed=row - 5, stop_ids=(1, 2), prompt=[1, 2, 3], output=[4, 4])
        for row in range(ROWS)
    ]


def steps(device: torch.device, logits: torch.Tensor) -> list[Draws]:
    sampler = Sampler(ROWS, VOCAB, device)
    sampler.set_rows(new_rows())
    rows = list(range(ROWS))
    row_index = torch.arange(ROWS, device=device)
    results = []
    for step in range(3):
        positions = torch.full((ROWS,), 5 + step, device=device)
        results.append(sampler.sample(logits.to(device, copy=True), rows, row_index, positions))
    return results


def test_ids_and_logprobs_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB) * 3
    for on_gpu, on_cpu in zip(steps(torch.device("cuda"), logits), steps(torch.device("cpu"), logits)):
        assert torch.equal(on_gpu.token_ids.cpu(), on_cpu.token_ids)
        assert on_gpu.finite.all()
        assert on_gpu.logprobs is not None
        assert on_cpu.logprobs is not None
        torch.testing.assert_close(on_gpu.logprobs.sampled.cpu(), on_cpu.logprobs.sampled)
        torch.testing.assert_close(on_gpu.logprobs.top.cpu(), on_cpu.logprobs.top)


def test_neither_set_rows_nor_sample_waits(no_waiting: None) -> None:
    device = torch.device("cuda")
    steps(device, torch.randn(ROWS, VOCAB, device=device))


def test_broken_rows_of_every_kind_are_flagged_without_harm() -> None:
    logits = torch.randn(ROWS, VOCAB)
    logits[::3] = torch.nan
    logits[1::3, 5] = torch.inf
    logits[2, :] = -torch.inf
    draws = steps(torch.device("cuda"), logits)[-1]
    torch.cuda.synchronize()
    healthy = torch.zeros(ROWS, dtype=torch.bool)
    healthy[2::3] = True
    healthy[2] = False
    assert torch.equal(draws.finite.cpu(), healthy)
    assert bool(((draws.token_ids >= 0) & (draws.token_ids < VOCAB)).all())


def test_the_hash_is_bit_for_bit_that_of_the_cpu() -> None:
    def hashes(device: str) -> torch.Tensor:
        seeds = torch.arange(-8, 8, dtype=torch.int32, device=device)[:, None]
        return hash32(token_codes(VOCAB, torch.device(device)), *row_keys(seeds, seeds * 77_777, seeds + 40))

    assert torch.equal(hashes("cuda").cpu(), hashes("cpu"))


@pytest.mark.parametrize("variant", ["greedy", "plain", "min_p", "top_k", "top_p"])
def test_each_way_to_draw_can_be_captured_in_a_graph(variant: str) -> None:
    device = torch.device("cuda")
    logits = torch.randn(ROWS, VOCAB, device=device)
    codes = token_codes(VOCAB, device)
    seeds = torch.arange(ROWS, dtype=torch.int32, device=device)[:, None]
    positions = torch.full_like(seeds, 3)

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((ROWS, 1), value, dtype=dtype, device=device)

    temperature, log_min_p = full(0.8), full(-3.0)
    top_k, top_p = full(20 if variant == "top_k" else VOCAB, torch.int32), full(0.9)

    def draw() -> torch.Tensor:
        if variant == "greedy":
            return draw_greedy(logits)
        noise = Noise(codes, *row_keys(seeds, seeds, positions))
        if variant in ("plain", "min_p"):
            return draw_plain(logits, noise, temperature, log_min_p if variant == "min_p" else None)
        return draw_filtered(logits, noise, temperature, top_k, top_p, log_min_p, 20 if variant == "top_k" else VOCAB)

    draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw()
    for step in range(3):
        logits.normal_()
        positions.fill_(step)
        graph.replay()
        assert torch.equal(captured, draw())
    assert torch.isfinite(gumbel(codes, seeds, seeds)).all()
