"""Processes beside a start-up compile the kernels that it launches. No GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.config import EngineConfig
from aengine.engine.loaded import read_model_config
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.runtime.startup import start_cuda
from aengine.runtime.startup.compiling import rehearsal
from aengine.runtime.startup.compiling.compile_ahead import CompileAhead
from aengine.runtime.startup.compiling.job import Job
from tests.kernels.offline import MARKS
from tests.runtime.cuda.no_gpu import (
    DEVICE,
    EXPERTS,
    FP8,
    GPT_OSS,
    INT4,
    LORA,
    META,
    OF_EXPERTS,
    WIDE_FP8,
    Variants,
    attention_of,
    checkpoint,
    cuda_config,
    flash4,
    replace_cuda,
    with_adapters,
)

pytestmark = [*MARKS, pytest.mark.slow]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Variants:
    return replace_cuda(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "rows", "knobs", "more"),
    [
        pytest.param("flash-attn-2", 5, {"kv_cache_gib": 0.25, "max_step_tokens": 64}, {}, id="not-captured"),
        pytest.param("flash-attn-4", 70, {"cuda_graphs": False}, {}, id="no-graphs"),
        pytest.param("flash-attn-2", 5, {"kv_cache_gib": 0.25}, EXPERTS | FP8, id="experts-fp8"),
        pytest.param("flash-attn-4", 256, {}, WIDE_FP8, id="wide-fp8"),
        pytest.param("flash-attn-4", 256, {}, EXPERTS | INT4, id="experts-int4"),
        pytest.param("flash-attn-4", 256, {"unpacked_copies": True}, INT4, id="unpacked-copies"),
        pytest.param("flash-attn-4", 40, {}, GPT_OSS, id="gpt-oss"),
        pytest.param("flash-attn-4", 5, {"kv_cache_dtype": "fp8", "max_step_tokens": 64}, {}, id="fp8-short-steps"),
        pytest.param("flash-attn-4", 40, OF_EXPERTS, EXPERTS, id="adapters-of-experts"),
        pytest.param("flash-attn-2", 5, LORA | {"kv_cache_gib": 0.25}, INT4, id="adapters-not-captured-int4"),
    ],
)
def test_processes_beside_a_start_up_compile_all_that_it_launches(
    attention: str,
    rows: int,
    knobs: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Path,
    compiled: Variants,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_cuda, "choose_prefill", lambda *_: attention_of(attention, compiled.flash))
    knobs = with_adapters(knobs, tmp_path)
    monkeypatch.setattr(rehearsal, "flash4_is_installed", lambda: attention == "flash-attn-4")
    config = cuda_config(rows, **knobs)
    folder = checkpoint(tmp_path, 8, more)
    start_cuda.start_cuda(config, folder, read_model_config(config, folder), DEVICE, lambda: None, lambda: None)
    launched, attended = set(compiled.known), set(compiled.flash)
    assert len(launched) > 20
    assert any("fp8.library _add_up_kernel" in variant for variant in launched) == (more is WIDE_FP8)
    assert bool(attended) == (attention == "flash-attn-4")
    compiled.known.clear()
    compiled.flash.clear()
    rehearsal.run_through(compiled.jobs[0])
    assert launched <= compiled.known
    rehearsal.launch_flash(compiled.jobs[0], flash4(compiled.flash), META)
    assert attended <= compiled.flash


def test_a_library_that_fails_is_told_before_weights_are_read(
    tmp_path: Path, compiled: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after the processes have begun to compile, which end with the start-up."""
    ended = []

    @contextlib.contextmanager
    def processes(job: Job) -> Iterator[CompileAhead]:
        try:
            yield CompileAhead([], [])
        finally:
            ended.append(job)

    def broken() -> None:
        assert ended == []
        raise ConfigError("cuBLAS")

    def load_weights(*args: object, **options: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(start_cuda, "compile_ahead", processes)
    monkeypatch.setattr(start_cuda, "load_weights", load_weights)
    folder = checkpoint(tmp_path, 8, {})
    config = EngineConfig(device="cuda", dtype="bfloat16", load_format="dummy", progress=False)
    with pytest.raises(ConfigError, match="cuBLAS"):
        start_cuda.start_cuda(config, folder, ModelConfig.from_folder(folder), DEVICE, broken, lambda: None)
    assert len(ended) == 1
