"""Batches that mix adapters and none compute what PEFT's merged weights compute, for what adapters may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..checkpoints import CASES, write_checkpoint
from .adapters import ALL, assert_mixed, load, write_adapter

ALWAYS = ("qwen3", "qwen2-moe-some-layers")  # the others among the slow tests
DENSE = [case for case in CASES if case not in ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe")]
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
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES]
)
def test_several_adapters_and_none_in_one_batch(case: str, tmp_path: Path) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    adapters = [tmp_path / name for name in ("one", "two", "three")]
    targets = ALL if case in DENSE else ["q_proj", "k_proj", "v_proj", "o_proj"]
    models = [
        base,
        write_adapter(base, adapters[0], 1, target_modules=targets),
        write_adapter(base, adapters[1], 2, target_modules=targets[1:], r=9),
        write_adapter(base, adapters[2], 3, target_modules=targets[:2], r=2, use_rslora=True),
    ]
    decoder = load(tmp_path / "base", adapters)
    assert_mixed(decoder, models)
    assert_mixed(decoder, models, chunk=5)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_whatever_the_settings_say(settings: dict[str, object], tmp_path: Path) -> None:
    base = write_checkpoint("qwen3-bias-untied", tmp_path / "base")
    merged = write_adapter(base, tmp_path / "adapter", **settings)
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged], chunk=9)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "qwen2-moe", "olmoe"])
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:]], ids=["both", "gate and up", "down"])
def test_adapters_of_all_experts_in_one(case: str, parameters: list[str], tmp_path: Path) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    adapters = [tmp_path / "one", tmp_path / "two"]
    models = [
        base,
        write_adapter(base, adapters[0], 1, target_modules=["q_proj"], target_parameters=parameters, r=3),
        write_adapter(base, adapters[1], 2, target_modules=["o_proj"]),
    ]
    assert_mixed(load(tmp_path / "base", adapters), models, chunk=9)
