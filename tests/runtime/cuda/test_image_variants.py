"""Start-up compiles every variant of the kernels that steps with images need. No kernel runs, as in test_variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

pytest.importorskip("triton")  # comes with the runner's kernels

from aengine.model.config import ModelConfig
from aengine.runtime.startup import start_cuda
from aengine.runtime.startup.compiling import rehearsal
from bench.shapes import add_tower
from tests.kernels.offline import MARKS
from tests.runtime.cuda.no_gpu import DEVICE, attention_of, checkpoint, cuda_config, replace_cuda
from tests.runtime.cuda.serving import serve
from tests.runtime.cuda.test_drafted_variants import RECURRENT

pytestmark = [*MARKS, pytest.mark.slow]

HYBRID: dict[str, Any] = RECURRENT | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    | {"mrope_section": [6, 5, 5]}
}
# Tokens of an image see all of it. Without flash-attn-4's heads, our kernel also attends to the text.
GEMMA: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
GEMMA |= {"query_pre_attn_scalar": 128, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("shape", "tower", "knobs"),
    [
        pytest.param(HYBRID, "small", {"speculation": "mtp"}, id="recurrent"),
        pytest.param(GEMMA, "gemma3-small", {}, id="gemma"),
        pytest.param(GEMMA, "gemma3-small", {"kv_cache_dtype": "fp8"}, id="gemma-fp8"),
        pytest.param(GEMMA | {"head_dim": 160}, "gemma3-small", {"cuda_graphs": False}, id="gemma-160"),
    ],
)
def test_nothing_is_compiled_while_serving(
    shape: dict[str, Any], tower: str, knobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = replace_cuda(monkeypatch)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, **__: q.clone())  # takes a CPU minutes
    monkeypatch.setattr(rehearsal, "flash4_is_installed", lambda: True)
    monkeypatch.setattr(start_cuda, "choose_prefill", lambda *_: attention_of("flash-attn-4", compiled.flash))
    folder = checkpoint(tmp_path, 8, shape)
    add_tower(folder, tower, 8999)
    config = cuda_config(5, max_step_tokens=600, **knobs)
    runtime = start_cuda.start_cuda(config, folder, ModelConfig.from_folder(folder), DEVICE, lambda: None, lambda: None)
    launched, attended = set(compiled.known), set(compiled.flash)
    compiled.new.clear()
    executor: Any = runtime.runner
    encoder = executor._executor._images
    before = encoder.computed
    assert serve(runtime, 5) > 50
    assert encoder.computed > before + 20
    assert compiled.new == []
    assert compiled.flash == attended
    compiled.known.clear()
    rehearsal.run_through(compiled.jobs[0])
    assert launched <= compiled.known
    chunks = [variant for variant in launched if "_chunks_kernel" in variant]
    windows = 2  # layers with a window, and layers without
    assert len(chunks) == (0 if shape is HYBRID else 2 * windows if "head_dim" in shape else windows)
