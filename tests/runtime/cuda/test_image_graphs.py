"""Captured steps know the positions after images, and none of them leaves out an image. The graphs run on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.kernels.decodes import torch_decodes
from aengine.kernels.delta.torch_delta import TorchDelta
from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.decode_shapes import DecodeShape, drafted_shapes, graph_sizes
from aengine.runtime.cuda.prefill_graphs import PrefillGraphs
from aengine.runtime.cuda.runner import GraphedExecutor
from aengine.runtime.runner import CpuRunner
from aengine.runtime.speculation import choose
from aengine.runtime.startup import start_torch
from aengine.runtime.step.cells import StepShape
from aengine.runtime.step.executor import TokenPass
from aengine.runtime.step.results import read_outcome
from aengine.sampling.sampler import Sampler
from aengine.step_plan import StepPlan, StepResult
from tests.engine.images.seeing import CHATS, GREEDY, Seeing, ask, make_seeing
from tests.runtime.cuda.cpu_graph import CpuGraph, RecordableAttention, RecordableNgram, recordable
from tests.runtime.cuda.test_prefill_graphs import Uncaptured, with_host_copies

pytestmark = pytest.mark.anyio


class Attention(RecordableAttention):
    """torch's attention over steps of a fixed shape, whose lengths the host does not know."""

    def bind(self, layer: Any) -> Any:
        attend = super().bind(layer)
        return lambda q, k, v, batch: attend(q, k, v, batch if batch.query_lens else _with_lengths(batch))


def _with_lengths(batch: Any) -> Any:
    return batch if batch.decode_queries > 1 or len(batch.seq_lens) == batch.num_decodes else with_host_copies(batch)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let engines on the CPU replay graphs of all kinds. Counts the steps of each kind."""
    seen: Counter[str] = Counter()

    class Executor(GraphedExecutor):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            decoder, kv, sampler, rows, states, proposer = parts[:6]
            with torch.inference_mode():
                shapes = [*map(DecodeShape, graph_sizes(rows.padding))]
                shapes += drafted_shapes(rows.padding, rows.most_drafts) if rows.most_drafts else []
                graphs = Graphs(decoder, kv, sampler, rows, proposer, torch_decodes, shapes, None, states)
                self.decode_graphs = graphs
                for size in reversed(graphs.sizes):
                    graphs.record(size)
                graphs.rehearse(graphs.sizes[0])
            taps = None if proposer is None else proposer.taps
            prefill = PrefillGraphs(decoder, kv, rows, [8, 16, 32, 64], lambda *_: True, None, states, taps)
            self.prefill_graphs = prefill
            for size in prefill.sizes:
                shape = StepShape.padded(size, rows.padding, rows.most_drafts)
                prefill._graphs[size, False] = Uncaptured(prefill, shape, False)  # type: ignore[assignment]

        def _begin_replay(self, plan: StepPlan) -> None:
            seen["new rows"] += bool(plan.new_rows)
            super()._begin_replay(plan)

        def _pass(self, plan: StepPlan) -> TokenPass:
            if plan.prefill:
                images = any(chunk.images is not None for chunk in plan.prefill)
                captured = self._prefill_shape_for(plan) is not None
                seen["images" if images else "prefill" if captured else "eager"] += 1
                assert not (images and captured)
            return super()._pass(plan)

    class Graphs(DecodeGraphs):
        def _replay_forward(self, plan: StepPlan, shape: DecodeShape) -> Any:
            seen["decode"] += 1
            return super()._replay_forward(plan, shape)

    class Runner(CpuRunner):
        def _run(self, plan: StepPlan) -> StepResult:
            for new in plan.new_rows:
                self._logprob_counts[new.row] = new.params.logprobs
            return read_outcome(self._executor.execute(plan), self._logprob_counts.get, plan)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CpuGraph)
    monkeypatch.setattr(start_torch, "StepExecutor", Executor)
    monkeypatch.setattr(start_torch, "CpuRunner", Runner)
    monkeypatch.setattr(start_torch, "TorchAttention", Attention)
    for name in ("draw_simple", "draw_filtered"):
        monkeypatch.setattr(Sampler, name, recordable(getattr(Sampler, name)))
    monkeypatch.setattr(choose, "_ngram_kernels", lambda device: RecordableNgram)
    monkeypatch.setattr(TorchDelta, "__call__", recordable(TorchDelta.__call__))
    return seen


@pytest.fixture(scope="module", params=["qwen3-5", "qwen3-vl", "mistral3", "gemma3", "gemma4-plain"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_seeing(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("speculation", ["off", "ngram"])
async def test_ids_are_those_of_transformers(seeing: Seeing, steps: Counter[str], speculation: str) -> None:
    step = 143 if seeing.case == "gemma4-plain" else 24  # a step holds a whole image of Gemma
    knobs = {"page_size": 4, "max_num_seqs": 3, "max_step_tokens": step, "torch_threads": 1}
    async with seeing.engine(speculation=speculation, **knobs) as engine:
        for _ in range(2):
            assert [answer.token_ids for answer in await ask(engine)] == seeing.expected
        for chat, expected in zip(CHATS, seeing.expected):
            [answer] = await ask(engine, [chat])
            assert answer.token_ids == expected
        assert steps["decode"] > 20
        assert steps["images"] > 5
        assert steps["prefill"] > 0


@pytest.mark.parametrize("speculation", ["off", "ngram"])
async def test_a_row_may_be_new_in_a_step_that_only_decodes(
    seeing: Seeing, steps: Counter[str], speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens before an image are cached, and the tower needs several steps beside a stream."""
    real: Any = start_torch.image_cost
    monkeypatch.setattr(start_torch, "image_cost", lambda model: replace(real(model), token=1e6))
    async with seeing.engine(speculation=speculation, page_size=1, torch_threads=1) as engine:
        await ask(engine, CHATS[:1])
        stream = engine.generate([5, 9, 3], max_tokens=300, **GREEDY)
        await anext(stream)
        steps.clear()
        [answer] = await ask(engine, CHATS[4:5])
        assert answer.token_ids == seeing.expected[4]
        # A cached prefix of a model with recurrent layers ends earlier.
        assert (steps["new rows"] > 0) == (seeing.case != "qwen3-5")
        await stream.aclose()
