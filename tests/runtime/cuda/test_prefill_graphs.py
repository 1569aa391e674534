"""A step padded to a fixed shape gives the same results. The graphs of a GPU run here without being captured."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aengine.attention.base import Attend, AttentionBatch, AttentionLayer
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.loading.hub import resolve_model
from aengine.model.loading.load import adaptable_linears
from aengine.model.lora.room import LoraRoom, kind_of
from aengine.requests.sampling_params import SamplingParams
from aengine.runtime.cuda.prefill_graphs import MOST_PADDING, PrefillGraphs, prefill_sizes
from aengine.runtime.runner import StepExecutor
from aengine.runtime.step.cells import StepShape
from aengine.runtime.step.executor import Forwarded, Outcome, TokenPass
from aengine.runtime.step.results import read_outcome
from aengine.step_plan import Pool, StepPlan
from tests.lessons.rig import Rig
from tests.model.checkpoints import write_checkpoint
from tests.model.loading_one import load_model


class FixedShapeAttention(TorchAttention):
    """Give the reference a batch with host copies, made from one whose numbers are on the device alone."""

    def bind(self, layer: AttentionLayer) -> Attend:
        attend = super().bind(layer)
        return lambda q, k_cache, v_cache, batch: attend(q, k_cache, v_cache, with_host_copies(batch))


def with_host_copies(batch: AttentionBatch) -> AttentionBatch:
    if batch.query_lens:
        return batch
    starts, lens = batch.query_starts.tolist(), batch.seq_lens.tolist()
    kept = [i for i, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]
    assert [i for i in range(batch.num_decodes) if lens[i] >= 0] == [i for i in kept if i < batch.num_decodes]
    return AttentionBatch(
        slots=batch.slots,
        page_table=batch.page_table[kept],
        seq_lens=batch.seq_lens[kept],
        query_starts=torch.tensor([*(starts[i] for i in kept), starts[-1]], dtype=torch.int32),
        num_decodes=sum(i < batch.num_decodes for i in kept),
        query_lens=[starts[i + 1] - starts[i] for i in kept],
        context_lens=[lens[i] for i in kept],
    )


class Uncaptured:
    def __init__(self, graphs: PrefillGraphs, shape: StepShape, adapted: bool) -> None:
        self.graphs, self.shape, self.adapted = graphs, shape, adapted

    def replay(self) -> None:
        self.graphs.forward(self.shape, self.adapted)


class FixedShapeExecutor(StepExecutor):
    """Steps with chunks go through `PrefillGraphs`, as on a GPU."""

    def __init__(self, usual: StepExecutor) -> None:
        super().__init__(usual._decoder, usual.kv, usual._sampler, usual._rows)
        self.graphs = PrefillGraphs(self._decoder, self.kv, self._rows, prefill_sizes(256, 256, 256), lambda *_: True)
        for size in self.graphs.sizes:
            shape = StepShape.padded(size, self._rows.padding, 0)
            for adapted in (False, True):
                self.graphs._graphs[size, adapted] = Uncaptured(self.graphs, shape, adapted)  # type: ignore[assignment]
        self.replayed = self.adapted = 0
        self.shapes: set[int] = set()

    def _pass(self, plan: StepPlan) -> TokenPass:
        shape = self.graphs.shape_for(plan) if plan.prefill else None
        if shape is None:
            return super()._pass(plan)
        self.replayed += 1
        self.shapes.add(shape.tokens)
        self.adapted += self._rows.has_adapters(plan)
        return self.graphs.replay(plan, shape)

    def forward(self, plan: StepPlan) -> Forwarded:
        forwarded = super().forward(plan)
        assert self._rows.length.tolist() == [*self._rows.lengths[:-1], 0]
        return forwarded


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    folder = resolve_model(None, None)
    return load_model(
        folder,
        ModelConfig.from_folder(folder),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=FixedShapeAttention(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_ids_are_those_of_steps_of_any_shape(decoder: Decoder, depth: int) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(1, 150))] for _ in range(12)]
    outputs = []
    for fixed in (False, True):
        rig = Rig(decoder, max_rows=5, max_step_tokens=96)
        if fixed:
            rig.executor = executor = FixedShapeExecutor(rig.executor)
        sequences = [rig.add(prompt, 9) for prompt in prompts]
        rig.run(depth)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert executor.replayed > 10
    assert executor.shapes <= set(executor.graphs.sizes)


class Near:
    """Every other row never leaves the trained context."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor

    def execute(self, plan: StepPlan) -> Outcome:
        for new in plan.new_rows:
            new.near = bool(new.tokens[0] % 2)
        return self._executor.execute(plan)


def test_ids_are_those_of_steps_of_any_shape_where_rows_are_rotated_differently(tmp_path: Path) -> None:
    write_checkpoint("phi3-beyond-the-trained-context", tmp_path, original_max_position_embeddings=200)
    decoder = load_model(
        tmp_path,
        ModelConfig.from_folder(tmp_path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=FixedShapeAttention(),
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(1, 150))] for _ in range(12)]
    outputs = []
    for fixed, near in ((False, False), (False, True), (True, True)):
        rig = Rig(decoder, max_rows=5, max_step_tokens=96, prefix_cache=False)
        if fixed:
            rig.executor = executor = FixedShapeExecutor(rig.executor)
        if near:
            rig.executor = Near(rig.executor)  # type: ignore[assignment]
        sequences = [rig.add(prompt, 9) for prompt in prompts]
        rig.run(1)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] != outputs[1] == outputs[2]
    assert executor.replayed > 10


class Adapted:
    """Gives every third row an adapter, and every third one another."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor

    def execute(self, plan: StepPlan) -> Outcome:
        for new in plan.new_rows:
            new.adapter = new.tokens[0] % 3
        return self._executor.execute(plan)


@pytest.mark.slow
def test_ids_are_those_of_steps_of_any_shape_with_adapters() -> None:
    folder = resolve_model(None, None)
    config = ModelConfig.from_folder(folder)
    linears = adaptable_linears(config)
    config = config.with_lora(LoraRoom(places=2, rank=8, kinds=tuple({kind_of(site) for site in linears.sites})))
    decoder = load_model(
        folder,
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=TorchKernels(),
        attention=FixedShapeAttention(),
    )
    assert decoder.adapters is not None
    generator = torch.Generator().manual_seed(0)
    for site in decoder.adapters.sites.values():
        assert site.weights is not None
        for factor in (site.weights.a, site.weights.b):
            factor[1:].normal_(0.0, 0.1, generator=generator)
    rng = random.Random(3)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(1, 150))] for _ in range(12)]
    outputs = []
    for fixed, adapted in ((False, False), (False, True), (True, True)):
        rig = Rig(decoder, max_rows=5, max_step_tokens=96, prefix_cache=False)
        if fixed:
            rig.executor = executor = FixedShapeExecutor(rig.executor)
        if adapted:
            rig.executor = Adapted(rig.executor)  # type: ignore[assignment]
        sequences = [rig.add(prompt, 9) for prompt in prompts]
        rig.run(1)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[1] == outputs[2]
    changed = [without != output for without, output in zip(outputs[0], outputs[1])]
    assert changed == [prompt[0] % 3 > 0 for prompt in prompts]
    assert executor.adapted > 10


def test_a_step_that_scores_its_prompts_is_not_taken(decoder: Decoder) -> None:
    """A graph keeps only the hidden states that draw, but scores need all."""
    cuda_runner = pytest.importorskip("aengine.runtime.cuda.runner", reason="needs Triton", exc_type=ImportError)
    rig = Rig(decoder, max_rows=2, max_step_tokens=32)
    usual = rig.executor
    executor = cuda_runner.GraphedExecutor(usual._decoder, usual.kv, usual._sampler, usual._rows)
    executor.prefill_graphs = FixedShapeExecutor(usual).graphs
    rig.add([1, 2, 3], 2).params = SamplingParams(prompt_logprobs=1, max_tokens=2, temperature=0)
    rig.add([4, 5], 2)
    step = rig.scheduler.schedule()
    assert step is not None
    assert executor.prefill_graphs.shape_for(step) is not None
    outcome = executor.execute(step)
    assert len(outcome.draws.token_ids) == 2
    assert [len(one.logprobs) for one in outcome.scores] == [2]


@pytest.mark.parametrize("kinds", [("last", "last"), ("last", "tokens"), ("mean", "last")])
def test_what_is_pooled_is_the_same_in_a_step_of_fixed_shape(decoder: Decoder, kinds: tuple[Any, Any]) -> None:
    """A mean needs all hidden states, which no graph keeps: that step is launched kernel by kernel."""
    cuda_runner = pytest.importorskip("aengine.runtime.cuda.runner", reason="needs Triton", exc_type=ImportError)
    outcomes = []
    for fixed in (False, True):
        rig = Rig(decoder, max_rows=5, max_step_tokens=64)
        usual = rig.executor
        writers = [rig.add([3, 4, 5], 4), rig.add([6], 4)]
        rig.executor.execute(scheduled := rig.scheduler.schedule())
        assert len(scheduled.prefill) == 2
        if fixed:
            rig.executor = cuda_runner.GraphedExecutor(usual._decoder, usual.kv, usual._sampler, usual._rows)
            rig.executor.prefill_graphs = graphs = FixedShapeExecutor(usual).graphs
        for first, kind in enumerate(kinds):
            rig.add(list(range(first, first + 20)), 1).pool = Pool(kind, (5, 9) if kind == "tokens" else ())
        drawn = rig.add([7, 8], 4)
        step = rig.scheduler.schedule()
        assert (len(step.decode), step.pooled, len(step.sampled_rows)) == (len(writers), 2, 3)
        if fixed:
            assert graphs.shape_for(step) is not None
            assert (rig.executor._prefill_shape_for(step) is None) == ("mean" in kinds)
        outcomes.append(read_outcome(rig.executor.execute(step), lambda row: None, step))
        assert drawn.pool is None
    plain, other = outcomes
    assert other.token_ids == plain.token_ids
    for one, another in zip(plain.pooled, other.pooled, strict=True):
        assert list(another) == pytest.approx(list(one), abs=1e-4)


@pytest.mark.parametrize(("mixed", "most"), [(2304, 8192), (100, 8192), (8192, 8192), (48, 48), (3000, 64)])
def test_sizes_lie_close_up_to_mixed_steps_and_end_with_the_largest(mixed: int, most: int) -> None:
    sizes = prefill_sizes(mixed, mixed, most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert min(mixed, most) <= max(size for size in sizes if size <= max(mixed + MOST_PADDING, most))
    for smaller, larger in itertools.pairwise([size for size in sizes if size <= mixed]):
        assert larger - smaller <= max(32, smaller / 4)


def test_full_steps_beside_decodes_are_captured_beyond_the_close_sizes() -> None:
    """The host launches such a step faster than the device runs it, but it blocks when the launch queue is full."""
    sizes = prefill_sizes(4096, 7552, 16384)
    assert [size for size in sizes if size >= 4096] == [4096, 7552, 16384]
    assert prefill_sizes(4096, 7500, 16384)[-2] == 7552
    assert prefill_sizes(4096, 9000, 8192)[-2:] == [4096, 8192]
