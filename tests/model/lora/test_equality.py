"""Batches with and without adapters compute what PEFT's merged weights do, for all modules that adapters change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from tests.model.loading_one import load_model

from ..checkpoints import CASES, write_checkpoint
from ..harness import Harness, Running
from .adapters import ALL, assert_mixed, load, write_adapter

ALWAYS = ("qwen3", "qwen2-moe-some-layers")  # all others are slow tests
DENSE = [case for case in CASES if case not in ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe")]
FUSED = ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]
LATENT = ["kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Only the language model's: PEFT cannot adapt linears of that vision tower.
IN_WRAPPER = [f"language_model.layers.{i}.self_attn.{name}_proj" for name in "qo" for i in range(2)]
SETTINGS: dict[str, dict[str, object]] = {
    "attention alone": {"target_modules": ["q_proj", "v_proj"]},
    "rank 1": {"r": 1},
    "rank-stabilised": {"r": 16, "use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3, r"layers\.1\.mlp\.down_proj": 1},
    },
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "a regular expression": {"target_modules": r".*\.(q_proj|o_proj|up_proj)"},
    "all but some": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "the output matrix": {"target_modules": ["lm_head", "gate_proj"]},
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES],
)
def test_several_adapters_and_none_in_one_batch(case: str, tmp_path: Path) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    adapters = [tmp_path / name for name in ("one", "two", "three")]
    targets = ALL if case in DENSE else ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets = FUSED if "phi3" in case else targets
    targets = LATENT if case.startswith(("deepseek", "glm4-flash", "kimi")) else targets
    targets = IN_WRAPPER if case == "gemma4-that-sees" else targets
    models = [
        base,
        write_adapter(base, adapters[0], 1, target_modules=targets),
        write_adapter(base, adapters[1], 2, target_modules=targets[1:], r=9),
        write_adapter(base, adapters[2], 3, target_modules=targets[:2], r=2, use_rslora=True),
    ]
    decoder = load(tmp_path / "base", adapters)
    assert_mixed(decoder, models)
    assert_mixed(decoder, models, chunk=5)


@pytest.mark.slow
def test_matrices_whose_rows_are_interleaved_by_head(tmp_path: Path) -> None:
    base = write_checkpoint("qwen3-next", tmp_path / "base")
    adapters = [tmp_path / "one", tmp_path / "two"]
    targets = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
    models = [
        base,
        write_adapter(base, adapters[0], 1, target_modules=targets),
        write_adapter(base, adapters[1], 2, target_modules=targets[:1], r=9),
    ]
    assert_mixed(load(tmp_path / "base", adapters), models)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(SETTINGS[name], id=name, marks=pytest.mark.slow if at else ()) for at, name in enumerate(SETTINGS)],
)
def test_whatever_the_settings_say(settings: dict[str, object], tmp_path: Path) -> None:
    base = write_checkpoint("qwen3-bias-untied", tmp_path / "base")
    merged = write_adapter(base, tmp_path / "adapter", **settings)
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged], chunk=9)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "case",
    [
        "qwen3-moe",
        "gpt-oss",  # inputs before outputs; columns of gate and up alternate
        "llama4",  # inputs before outputs; gates first
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("mixtral", "qwen2-moe", "olmoe")),
    ],
)
@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param(EXPERTS, id="both"),
        pytest.param(EXPERTS[:1], id="gate and up", marks=pytest.mark.slow),
        pytest.param(EXPERTS[1:], id="down", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_all_experts_in_one(case: str, parameters: list[str], tmp_path: Path) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    adapters = [tmp_path / "one", tmp_path / "two"]
    if case == "llama4":
        parameters = [name.replace("mlp.", "feed_forward.") for name in parameters]
    models = [
        base,
        write_adapter(base, adapters[0], 1, target_modules=["q_proj"], target_parameters=parameters, r=3),
        write_adapter(base, adapters[1], 2, target_modules=["o_proj"]),
    ]
    assert_mixed(load(tmp_path / "base", adapters), models, chunk=9)


class Operations(TorchDispatchMode):
    """Records the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_batch_without_adapters_computes_what_it_computes_without_room_for_any(tmp_path: Path) -> None:
    base = write_checkpoint("qwen2-moe", tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", target_modules="all-linear", target_parameters=EXPERTS)
    config = ModelConfig.from_folder(tmp_path / "base")
    cpu = torch.device("cpu")
    plain = load_model(
        tmp_path / "base", config, device=cpu, dtype=torch.float32, kernels=TorchKernels(), attention=TorchAttention()
    )
    adapted = load(tmp_path / "base", [tmp_path / "adapter"])
    assert plain.adapters is None
    operations, results = [], []
    for decoder, place in ((plain, 0), (adapted, 0), (adapted, 1)):
        harness = Harness(decoder, page_size=16)
        sequences = [Running(list(range(5, 5 + length)), adapter=place) for length in (3, 8)]
        with Operations() as noted:
            harness.run(sequences, 4)
        operations.append(noted.names)
        results.append([one.tokens for one in sequences])
    assert operations[0] == operations[1] != operations[2]
    assert results[0] == results[1]
