"""Start-up compiles every variant of the kernels that serving needs.

The real start-up and real steps run on a CPU. No kernel runs: Triton only reports the variant that it would launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.model.config import ModelConfig
from aengine.runtime.startup import start_cuda
from aengine.runtime.startup.compiling import rehearsal
from aengine.runtime.startup.compiling.compile_ahead import CompileAhead
from aengine.runtime.startup.compiling.job import Job
from aengine.runtime.startup.sizing import cuda_memory
from tests.kernels.offline import MARKS
from tests.runtime.cuda.no_gpu import (
    DEVICE,
    EXPERTS,
    FP8,
    GIB,
    GPT_OSS,
    INT4,
    LATENTS,
    LLAMA4,
    LORA,
    MIMO,
    NEMOTRON,
    OF_EXPERTS,
    WIDE_FP8,
    Variants,
    attention_of,
    checkpoint,
    cuda_config,
    replace_cuda,
    with_adapters,
)
from tests.runtime.cuda.serving import serve

pytestmark = [*MARKS, pytest.mark.slow]

FP8_STATIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
INT8 = {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}}
NO_GRAPHS: dict[str, Any] = {"cuda_graphs": False}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Variants:
    return replace_cuda(monkeypatch)


@pytest.mark.parametrize(
    ("attention", "rows", "kv_heads", "knobs", "more"),
    [
        pytest.param("flash-attn-4", 200, 8, {}, {}, id="pool-sized"),
        pytest.param("flash-attn-4", 1, 8, {"kv_cache_gib": 0.25}, {}, id="one-row-pool-given"),
        pytest.param("flash-attn-2", 5, 8, {"max_step_tokens": 64}, {}, id="short-steps"),
        pytest.param("flash-attn-4", 70, 2, {"cuda_graphs": False}, {}, id="no-graphs-few-heads"),
        pytest.param("flash-attn-2", 5, 8, NO_GRAPHS | {"max_step_tokens": 2048}, {}, id="middling-steps-no-graphs"),
        pytest.param("flash-attn-4", 40, 8, {}, EXPERTS | FP8, id="experts-fp8"),
        pytest.param("flash-attn-4", 5, 8, {}, EXPERTS | {"mlp_only_layers": [0]}, id="experts-in-the-last-layer"),
        pytest.param("flash-attn-2", 5, 8, {"cuda_graphs": False}, EXPERTS | INT4, id="experts-int4-no-graphs"),
        pytest.param("flash-attn-4", 40, 8, {}, GPT_OSS, id="gpt-oss"),
        pytest.param("flash-attn-4", 40, 8, {}, NEMOTRON, id="nemotron-3"),
        pytest.param("flash-attn-4", 40, 8, {}, LLAMA4, id="llama-4"),
        pytest.param("flash-attn-2", 5, 8, {}, LLAMA4, id="llama-4-lengths-on-the-host"),
        pytest.param("flash-attn-4", 40, 4, {}, MIMO, id="mimo-v2-flash"),
        pytest.param("flash-attn-4", 40, 16, {"kv_cache_dtype": "fp8"}, LATENTS, id="latents-in-fp8"),
        pytest.param("flash-attn-2", 5, 8, {"kv_cache_gib": 0.25}, WIDE_FP8, id="wide-fp8-not-captured"),
        pytest.param("flash-attn-2", 5, 8, {"kv_cache_gib": 0.25}, INT4, id="int4-not-captured"),
        pytest.param("flash-attn-4", 40, 8, {}, EXPERTS | NVFP4, id="experts-nvfp4"),
        pytest.param("flash-attn-2", 5, 8, {"kv_cache_gib": 0.25}, INT8, id="int8-not-captured"),
        pytest.param("flash-attn-2", 5, 8, {"kv_cache_gib": 0.25}, FP8_STATIC, id="fp8-static-not-captured"),
        pytest.param("flash-attn-4", 40, 8, {"kv_cache_dtype": "fp8"}, {}, id="fp8-keys"),
        pytest.param("flash-attn-4", 40, 8, OF_EXPERTS, EXPERTS, id="adapters-of-experts"),
        pytest.param("flash-attn-2", 5, 8, LORA | {"cuda_graphs": False}, FP8, id="adapters-no-graphs-fp8"),
    ],
)
def test_nothing_is_compiled_while_serving(
    attention: str,
    rows: int,
    kv_heads: int,
    knobs: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Path,
    compiled: Variants,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each knob and each format of weights in some case, not in all combinations: a case serves 100 requests."""
    monkeypatch.setattr(start_cuda, "choose_prefill", lambda *_: attention_of(attention, compiled.flash))
    knobs = with_adapters(knobs, tmp_path)
    config = cuda_config(rows, **knobs)
    folder = checkpoint(tmp_path, kv_heads, more)
    runtime = start_cuda.start_cuda(config, folder, ModelConfig.from_folder(folder), DEVICE, lambda: None, lambda: None)
    assert len(compiled.new) > 20
    assert any("fp8.library _add_up_kernel" in variant for variant in compiled.known) == (more is WIDE_FP8)
    compiled.new.clear()
    attended = set(compiled.flash)
    assert serve(runtime, rows) > 50
    assert compiled.new == []
    assert compiled.flash == attended


def test_nothing_is_compiled_while_serving_what_an_earlier_start_up_has_measured(
    tmp_path: Path, compiled: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(CompileAhead):
        def needs(self, devices: object) -> list[int]:
            return [GIB // 2]

    @contextlib.contextmanager
    def known(job: Job) -> Iterator[CompileAhead]:
        compiled.jobs.append(job)
        yield Known([], [])

    def tried(*_: object) -> None:
        raise AssertionError("the largest step is tried")

    monkeypatch.setattr(start_cuda, "compile_ahead", known)
    monkeypatch.setattr(start_cuda, "choose_prefill", lambda *_: attention_of("flash-attn-4", compiled.flash))
    monkeypatch.setattr(cuda_memory, "trial_steps", tried)
    monkeypatch.setattr(rehearsal, "flash4_is_installed", lambda: True)
    config = cuda_config(70)
    folder = checkpoint(tmp_path, 8, {})
    runtime = start_cuda.start_cuda(config, folder, ModelConfig.from_folder(folder), DEVICE, lambda: None, lambda: None)
    launched, attended = set(compiled.known), set(compiled.flash)
    compiled.new.clear()
    assert serve(runtime, 70) > 50
    assert compiled.new == []
    assert compiled.flash == attended
    compiled.known.clear()
    rehearsal.run_through(compiled.jobs[0])
    assert launched <= compiled.known  # compiled by the processes of the first start-up
