"""Reading config.json of Gemma 4, in transformers' and its publisher's forms, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig

from aengine.attention.torch_backend import TorchAttention
from aengine.errors import CheckpointError, UnsupportedModelError
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from tests.model.checkpoints import write_checkpoint
from tests.model.harness import Harness
from tests.model.loading_one import load_model

# The settings of the 12B and the 31B, with smaller sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "attention_k_eq_v": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "sliding_window": 20,
    "vocab_size": 128,
}
# The setting of E2B and E4B.
SMALL = {
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}


def read(folder: Path, **values: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | values))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [{}, SMALL, {"attention_k_eq_v": False}, {"num_hidden_layers": 18}],
    ids=["large", "small", "own values", "layers of one and of two digits"],
)
def test_both_spellings_describe_the_same_layers(changes: dict[str, object], tmp_path: Path) -> None:
    published = read(tmp_path, **changes)
    values = {**PUBLISHED, **changes}
    Gemma4TextConfig(**values).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in written
    assert "global_head_dim" not in written
    assert ModelConfig.from_folder(tmp_path) == published


def test_every_sixth_layer_and_the_last_see_everything(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.windows == [20, 20, 20, 20, 20, None, 20, None]
    kept = config.kv_shape(16, torch.bfloat16).layers
    assert [(layer.heads, layer.dim) for layer in kept] == [(4, 16)] * 5 + [(1, 32), (4, 16), (1, 32)]


def test_layers_that_share_keep_nothing(tmp_path: Path) -> None:
    config = read(tmp_path, **SMALL)
    assert [attention.shares_kv_of for attention in config.attending] == [None] * 6 + [4, 5]
    assert len(config.kv_shape(16, torch.bfloat16).layers) == 6


def test_projections_that_a_layer_does_not_use_are_left_aside(tmp_path: Path) -> None:
    write_checkpoint("gemma4-small", tmp_path)

    def answer() -> list[int]:
        config = ModelConfig.from_folder(tmp_path)
        decoder = load_model(
            tmp_path,
            config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kernels=TorchKernels(),
            attention=TorchAttention(),
        )
        return Harness(decoder, page_size=16).generate([[1, 2, 3]], 4)[0].tokens

    before = answer()
    path = tmp_path / "model.safetensors"
    unused = {f"model.layers.5.self_attn.{name}.weight": torch.ones(7) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(load_file(path) | unused, path)
    assert answer() == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention all"),
        ({"per_layer_config": {"3": {"sliding_window": 7}}}, "'sliding_window' of one layer"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers leaves no layer"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers must be"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 127}, r"vocab_size_per_layer_input \(127\)"),
        ({"hidden_size_per_layer_input": 2**18}, "hidden_size_per_layer_input times the layers"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads"),
    ],
)
def test_values_that_no_model_has(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why):
        read(tmp_path, **changes)
