"""MiMo-V2-Flash: settings and names of published files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from aengine.errors import UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import ExpertsSpec
from tests.engine.checkpoints import with_config
from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load

# The keys of published files, and which of transformers' keys they replace.
_PUBLISHED: dict[str, object] = {
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "sliding_window": 19,
    "sliding_window_size": 19,
    "rope_theta": 5_000_000,
    "swa_rope_theta": 10_000,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5,
    "swa_num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_shared_experts": None,
    "layer_types": None,
    "mlp_layer_types": None,
    "rope_parameters": None,
    "rms_norm_eps": None,
}


@pytest.mark.parametrize("published", [True, False])
def test_settings_as_published(published: bool, tmp_path: Path) -> None:
    model = write_checkpoint("mimo-v2-flash", tmp_path)
    if published:
        with_config(tmp_path, **_PUBLISHED)
    config = ModelConfig.from_folder(tmp_path)
    heads = [one for one in config.attending if isinstance(one, AttentionSpec)]
    assert [one.window for one in heads] == [None, 20, 20]
    assert [one.kv_heads for one in heads] == [2, 4, 4]
    assert [one.sinks for one in heads] == [False, True, True]
    assert [one.rope and one.rope.theta for one in heads] == [5e6, 1e4, 1e4]
    assert [isinstance(layer.ffn, ExpertsSpec) for layer in config.layers] == [False, True, True]
    assert_mixed(load(tmp_path, ()), [model])


def test_files_have_another_name_for_sinks(tmp_path: Path) -> None:
    write_checkpoint("mimo-v2-flash", tmp_path)
    assert "model.layers.1.self_attn.attention_sink_bias" in load_file(tmp_path / "model.safetensors")


def test_values_that_are_not_scaled(tmp_path: Path) -> None:
    model = write_checkpoint("mimo-v2-flash", tmp_path, attention_value_scale=None)
    assert_mixed(load(tmp_path, ()), [model])


def test_another_width_of_heads_with_a_window_is_refused(tmp_path: Path) -> None:
    write_checkpoint("mimo-v2-flash", tmp_path)
    with_config(tmp_path, swa_head_dim=32)
    with pytest.raises(UnsupportedModelError, match="swa_head_dim differs from head_dim"):
        ModelConfig.from_folder(tmp_path)
