"""The steps that a start-up runs so that none of its kinds comes as a surprise later."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from aengine.config import EngineConfig
from aengine.kernels.launch import Launch
from aengine.model.config import ModelConfig
from aengine.model.loading.hub import resolve_model
from aengine.runtime.runner import Runner
from aengine.runtime.startup.start import start_runtime
from aengine.step_plan import StepPlan

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.kernels.collective.config import sum_borders
from aengine.kernels.linear.fp8.config import fp8_borders
from aengine.kernels.linear.gated_rows import gated_config
from aengine.kernels.linear.int4.config import DENSE_ROWS
from aengine.runtime.cuda.capture import GraphSizes
from aengine.runtime.startup.warm_up import (
    decode_steps,
    greediest_largest_step,
    greediest_steps,
    largest_steps,
    long_chunks,
    narrow_steps,
    short_chunks,
    uncaptured_steps,
    widest_step,
)

pytestmark = pytest.mark.anyio


async def finite(runner: Runner, plan: StepPlan) -> list[bool]:
    return list((await runner.launch(plan).result()).finite)


@pytest.mark.parametrize(
    ("rows", "tokens", "context"),
    [
        (7, 64, 512),
        pytest.param(64, 64, 512, marks=pytest.mark.slow),
        (3, 600, 48),
        pytest.param(1, 512, 512, marks=pytest.mark.slow),
    ],
)
async def test_steps_that_need_no_page_of_their_own(rows: int, tokens: int, context: int) -> None:
    config = EngineConfig(device="cpu", max_num_seqs=rows, max_step_tokens=tokens, max_model_len=context, num_pages=40)
    folder = resolve_model(None, None)
    runtime = start_runtime(config, folder, ModelConfig.from_folder(folder))
    try:
        widest = widest_step(config, runtime.max_step_tokens, runtime.pool.max_model_len)
        chunks = len(widest.prefill)
        one_more = widest.num_tokens // chunks * (chunks + 1)
        assert widest.num_tokens <= tokens
        assert chunks == rows or one_more > tokens
        assert {page for new in widest.new_rows for page in new.pages} == {0}
        assert len(await finite(runtime.runner, widest)) == chunks
        for step in (*greediest_steps(), *narrow_steps(config, tokens, context)):
            assert {page for new in step.new_rows for page in new.pages} == {0}
            assert await finite(runtime.runner, step) == [True]
        short = short_chunks(config, tokens, context)
        for step in (short, *long_chunks(config, tokens, context)):
            assert {page for new in step.new_rows for page in new.pages} == {0}
            assert step.num_tokens <= tokens
            assert await finite(runtime.runner, step) == [True] * len(step.prefill)
        for step in decode_steps(config, Launch(132, True, 227 * 1024, (9, 0)), tokens):
            assert {page for new in step.new_rows for page in new.pages} <= {0}
            assert await finite(runtime.runner, step) == [True] * len(step.decode or step.prefill)
    finally:
        runtime.runner.close()


def test_the_greediest_of_the_largest_steps_scores_one_prompt() -> None:
    """Each of 256 prompts took as long again on the host, and no memory of its own."""
    plain, greediest = largest_steps(EngineConfig(max_num_seqs=256), 8192, 40960)
    assert not plain.scoring
    assert greediest.scoring
    assert [bool(chunk.score_ids) for chunk in greediest.prefill] == [True] + [False] * 255


def test_the_step_that_takes_the_most_memory_is_replayed_by_no_graph_and_owns_no_page() -> None:
    config = EngineConfig(max_num_seqs=16)
    step = greediest_largest_step(config, 8192, 40960)
    assert step.num_tokens == 8192
    assert step.needs_all_tokens
    assert {page for new in step.new_rows for page in new.pages} == {0}


@pytest.mark.parametrize("launch", [Launch(48, True, 227 * 1024, (9, 0)), Launch(128, False, 99 * 1024, (8, 9))])
@pytest.mark.parametrize("ranks", [1, 2])
def test_products_with_fp8_weights_have_met_every_cut_of_theirs(launch: Launch, ranks: int) -> None:
    config, most = EngineConfig(max_num_seqs=256), 8192
    model = ModelConfig.from_folder(resolve_model(None, None)).spread_over(ranks)
    # What ranks add up has borders of its own, with either.
    plain = uncaptured_steps(config, model, torch.bfloat16, launch, most, 4096, GraphSizes([], []))
    steps = uncaptured_steps(config, model.quantized_as("fp8"), torch.bfloat16, launch, most, 4096, GraphSizes([], []))
    tokens = {step.num_tokens for step in (*steps, *largest_steps(config, most, 4096))}  # sizing runs these
    for layer in model.layers:
        for n, k in layer.linears(model.hidden_size, ranks):
            for below, border in pairwise([64, *(rows for rows in fp8_borders(n, k, launch, most) if rows > 64), most]):
                assert any(below < count <= border for count in tokens)
    assert len(steps) > len(plain)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_ranks_have_met_every_cut_of_theirs(ranks: int) -> None:
    config, most = EngineConfig(max_num_seqs=16), 8192
    model = msgspec.structs.replace(ModelConfig.from_folder(resolve_model(None, None)), hidden_size=4096)
    launch, without = Launch(24, True, 227 * 1024, (9, 0)), GraphSizes([], [])
    plain = uncaptured_steps(config, model, torch.bfloat16, launch, most, 4096, without)
    over = msgspec.structs.replace(model, ranks=ranks)
    steps = uncaptured_steps(config, over, torch.bfloat16, launch, most, 4096, without)
    tokens = {step.num_tokens for step in (*steps, *largest_steps(config, most, 4096))}  # sizing runs these
    for below, border in pairwise([0, *sum_borders(4096 * 2 // 16, ranks, most), most]):
        assert any(below < count <= border for count in tokens)
    assert len(steps) > len(plain)


@pytest.mark.parametrize("most", [500, 1100, 2048, 8192])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["floats", "int4"])
def test_gate_and_up_have_met_the_kernel_of_many_rows(tmp_path: Path, form: str, ranks: int, most: int) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 9000, "max_position_embeddings": 4096}
    int4 = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}}
    family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(family | shape | (int4 if form == "int4" else {})))
    model, config = ModelConfig.from_folder(tmp_path).spread_over(ranks), EngineConfig(max_num_seqs=7, kv_cache_gib=1)
    launch = Launch(132, True, 227 * 1024, (9, 0))
    steps = uncaptured_steps(config, model, torch.bfloat16, launch, most, 4096, GraphSizes([], []))

    def gated(tokens: int) -> bool:
        least = DENSE_ROWS if form == "int4" else 1
        return tokens >= least and gated_config(tokens, 12288 // ranks, 4096, 2, launch) is not None

    assert any(map(gated, range(1, most + 1))) == any(gated(step.num_tokens) for step in steps)
    assert all(step.num_tokens <= most for step in steps)
