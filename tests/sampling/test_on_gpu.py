"""The sampler on a CUDA device: the same ids as on a CPU, no host sync, and draws that CUDA graphs can capture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aengine.requests.sampling_params import SamplingParams
from aengine.sampling import Draws, Sampler
from aengine.sampling.draw import Noise, draw_filtered, draw_greedy, draw_plain
from aengine.sampling.noise import gumbel, hash32, row_keys, token_codes
from aengine.step_plan import NewRow
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
    SamplingParams(temperature=0.7, top_p=0.9, allowed_token_ids=tuple(range(7, 90_000, 9)), logprobs=2),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Make calls raise that let the host wait for the device."""
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


def test_ids_and_logprobs_equal_those_of_the_cpu() -> None:
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


def test_rows_that_are_not_finite_are_flagged() -> None:
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


def test_the_hash_has_the_same_bits_as_on_the_cpu() -> None:
    def hashes(device: str) -> torch.Tensor:
        seeds = torch.arange(-8, 8, dtype=torch.int32, device=device)[:, None]
        return hash32(token_codes(VOCAB, torch.device(device)), *row_keys(seeds, seeds * 77_777, seeds + 40))

    assert torch.equal(hashes("cuda").cpu(), hashes("cpu"))


def filtered_rows(start: int = 0) -> list[NewRow]:
    """Return rows of kind FILTERED, with some SIMPLE ones."""
    kinds = [
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        SamplingParams(temperature=0, top_k=9, min_p=0.5),
        SamplingParams(temperature=1.0, top_p=0.95),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.2, top_k=50),
        SamplingParams(temperature=1.5, min_p=0.02),
        SamplingParams(temperature=2.0, top_p=0.999),
        SamplingParams(temperature=1.0, top_k=60_000, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1.0, top_k=1, top_p=0.4),
    ]
    return [new_row(row, kinds[(row + start) % len(kinds)], seed=3 * row - 50) for row in range(ROWS)]


@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_filtered_draws_equal_those_of_the_cpu(spread: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(ROWS, VOCAB) * spread
    logits[1::2] = logits[1::2].bfloat16().float()  # many equals
    logits[::5, 1000:] = -torch.inf
    samplers = {name: Sampler(ROWS, VOCAB, torch.device(name)) for name in ("cpu", "cuda")}
    for sampler in samplers.values():
        sampler.set_rows(filtered_rows())
    rows = list(range(ROWS))
    for step in range(3):
        ids = {}
        for name, sampler in samplers.items():
            row_index, positions = torch.arange(ROWS, device=name), torch.full((ROWS,), 7 + step, device=name)
            draws = sampler.draw_filtered(logits.to(name), row_index, positions)
            assert draws.finite.all()
            ids[name] = draws.token_ids.cpu()
            usual = sampler.sample(logits.to(name, copy=True), rows, row_index, positions)
            assert torch.equal(usual.token_ids.cpu(), ids[name])
        assert torch.equal(ids["cuda"], ids["cpu"])


def test_a_captured_filtered_draw_sees_new_rows(no_waiting: None) -> None:
    """One capture serves rows with any filters."""
    device = torch.device("cuda")
    sampler = Sampler(ROWS, VOCAB, device)
    sampler.set_rows(filtered_rows())
    logits = torch.randn(ROWS, VOCAB, device=device) * 3
    row_index = torch.arange(ROWS, device=device)
    positions = torch.full((ROWS,), 3, device=device)
    sampler.draw_filtered(logits, row_index, positions)
    torch.cuda.set_sync_debug_mode("default")  # a capture syncs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.draw_filtered(logits, row_index, positions)
    seen = []
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error")
        sampler.set_rows(filtered_rows(start=step))
        logits.normal_().mul_(3)
        logits[step] = torch.nan
        positions.fill_(step)
        graph.replay()
        again = sampler.draw_filtered(logits, row_index, positions)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(captured.token_ids, again.token_ids)
        assert torch.equal(captured.finite, again.finite)
        assert captured.finite.logical_not().nonzero().tolist() == [[step]]
        seen.append(captured.token_ids.tolist())
    assert len({tuple(ids) for ids in seen}) == 4


def test_nothing_is_compiled_for_another_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one draw of each kind no kernel is compiled."""
    import triton

    device = torch.device("cuda")
    sampler = Sampler(ROWS, VOCAB, device)
    sampler.set_rows(filtered_rows())
    logits = torch.randn(ROWS, VOCAB, device=device)

    def all_ways(count: int) -> None:
        row_index, positions = torch.arange(count, device=device), torch.full((count,), 9, device=device)
        sampler.draw_simple(logits[:count], row_index, positions)
        sampler.draw_filtered(logits[:count], row_index, positions)
        sampler.sample(logits[:count].clone(), list(range(count)), row_index, positions)

    all_ways(2)
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]))
    for count in (1, 3, 7, 16, 33, ROWS):
        all_ways(count)
    assert not compiled


def test_no_filter_sorts_the_vocabulary() -> None:
    """`sample` needs only a few passes over the logits, with any filters."""
    device = torch.device("cuda")
    sampler = Sampler(ROWS, VOCAB, device)
    sampler.set_rows(filtered_rows())
    logits = torch.randn(ROWS, VOCAB, device=device)
    row_index, positions = torch.arange(ROWS, device=device), torch.full((ROWS,), 9, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampler.sample(logits, list(range(ROWS)), row_index, positions)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20  # a sort needs memory for the sorted values


@pytest.mark.parametrize(
    ("params", "copies"),
    [
        (SamplingParams(temperature=0.7, top_p=0.9, logprobs=20), 0),
        (SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, logprobs=20), 1),
    ],
)
def test_penalties_copy_the_logits_once_and_logprobs_never(params: SamplingParams, copies: int) -> None:
    device = torch.device("cuda")
    sampler = Sampler(ROWS, VOCAB, device)
    sampler.set_rows([new_row(row, params) for row in range(ROWS)])
    logits = torch.randn(ROWS, VOCAB, device=device, dtype=torch.bfloat16)
    row_index, positions = torch.arange(ROWS, device=device), torch.full((ROWS,), 9, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sampler.sample(logits, list(range(ROWS)), row_index, positions)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < copies * logits.numel() * 4 + (2 << 20)


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
