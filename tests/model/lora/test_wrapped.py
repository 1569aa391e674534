"""Adapters of models with vision change the language model as PEFT's merged weights do. Other parts are ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from aengine.errors import AdapterError

from ..checkpoints import write_checkpoint
from .adapters import assert_mixed, load, write_adapter

CASES = ["mistral3", *(pytest.param(case, marks=pytest.mark.slow) for case in ("gemma3-that-sees", "qwen3-5-wrapped"))]
SETTINGS: dict[str, dict[str, object]] = {
    "all linears, of what it sees with as well": {"target_modules": "all-linear"},
    "alphas by long names": {
        "target_modules": ["gate_proj", "up_proj", "down_proj", "q_proj"],
        "alpha_pattern": {
            "model.language_model.layers.1.mlp.up_proj": 30,
            "^model.language_model.layers.0.mlp.down_proj": 1,
            "language_model.layers.1.mlp.gate_proj": 17,
            "^model.layers.1.mlp.down_proj": 40,  # no module has this name
        },
        "rank_pattern": {"language_model.layers.1.mlp.up_proj": 7},
    },
    "targets by long names": {
        "target_modules": ["model.language_model.layers.1.mlp.up_proj", "language_model.layers.0.mlp.down_proj"]
    },
    "some left out by long names": {
        "target_modules": ["up_proj", "down_proj"],
        "exclude_modules": ["model.language_model.layers.1.mlp.up_proj"],
    },
    "one layer": {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "a regular expression": {"target_modules": r".*language_model.*\.(q_proj|up_proj)"},
    "the output matrix": {"target_modules": ["lm_head", "up_proj"]},
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(SETTINGS[name], id=name, marks=pytest.mark.slow if at > 1 else ())
        for at, name in enumerate(SETTINGS)
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_settings_mean_the_names_that_the_whole_model_has(
    case: str, settings: dict[str, object], tmp_path: Path
) -> None:
    base = write_checkpoint(case, tmp_path / "base")
    merged = write_adapter(base, tmp_path / "adapter", **settings)
    assert_mixed(load(tmp_path / "base", [tmp_path / "adapter"]), [base, merged], chunk=9)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model."])
def test_other_versions_call_the_language_model_otherwise(prefix: str, tmp_path: Path) -> None:
    """Older versions of transformers, and adapters that were trained on the language model alone, have other names."""
    base, adapter = write_checkpoint("mistral3", tmp_path / "base"), tmp_path / "adapter"
    patterns = {"alpha_pattern": {"model.language_model.layers.1.mlp.up_proj": 30}}
    merged = write_adapter(base, adapter, target_modules=r".*language_model.*\.(q_proj|up_proj)", **patterns)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        path = adapter / name
        if name.endswith("json"):
            settings = json.loads(path.read_text())
            path.write_text(json.dumps(settings | {"alpha_pattern": {f"{prefix}layers.1.mlp.up_proj": 30}}))
        else:
            tensors = {key.replace("model.language_model.", prefix): value for key, value in load_file(path).items()}
            save_file(tensors, path)
    assert_mixed(load(tmp_path / "base", [adapter]), [base, merged])


def test_one_that_changes_nothing_of_the_language_model_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint("gemma3-that-sees", tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", target_modules=r".*vision_tower.*\.q_proj")
    with pytest.raises(AdapterError, match="changes only parts of the model that are not used here"):
        load(tmp_path / "base", [tmp_path / "adapter"])
