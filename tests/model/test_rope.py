"""The rotary table equals that of transformers, for every scheme and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from aengine.model.config import ModelConfig
from aengine.model.fields import Fields
from aengine.model.rope import RopeConfig, read_rope, rope_table

HEAD_DIM = 32
POSITIONS = 300
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("theta", [10_000.0, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, "original_max_position_embeddings": 64},
        {**LLAMA3, "original_max_position_embeddings": 8192, "low_freq_factor": 0.5},
        YARN,
        {**YARN, "factor": 1.0},
        {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
        {**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
        {**YARN, "truncate": False},
        {**YARN, "attention_factor": 0.75},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "mscale": 0.7},
        {"rope_type": "proportional", "partial_rotary_factor": 0.3},
        {"rope_type": "proportional", "factor": 2.0},
        {**YARN, "original_max_position_embeddings": 4096, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ],
    ids=str,
)
def test_equals_transformers(tmp_path: Path, scaling: dict[str, object], theta: float) -> None:
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={**scaling, "rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    position = torch.arange(POSITIONS).unsqueeze(0)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), position)
    ours = rope_table(
        ModelConfig.from_folder(tmp_path).layers[0].attention.rope or RopeConfig(),
        HEAD_DIM,
        POSITIONS,
        torch.device("cpu"),
    )
    half = HEAD_DIM // 2
    # At the last position, an error of a frequency in its last bit has grown 300 times.
    torch.testing.assert_close(ours, torch.cat((cos[0, :, :half], sin[0, :, :half]), 1), atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("scaling", "usable"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 256}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),  # the trained context is then the context itself
        ({"rope_type": "linear", "factor": 4.0}, 512),
    ],
)
def test_yarn_extends_the_context(tmp_path: Path, scaling: dict[str, object], usable: int) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "rope_scaling": scaling,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path).max_position_embeddings == usable


@pytest.mark.parametrize(("inner", "expected"), [({"partial_rotary_factor": 0.5}, 0.5), ({}, 0.25)])
def test_a_part_in_the_section_replaces_the_one_outside(inner: dict[str, float], expected: float) -> None:
    """Some versions of transformers also write the default outside of the section, and do not read it."""
    section = {"rope_type": "default", "rope_theta": 1e4, **inner}
    config = {"rope_parameters": section, "partial_rotary_factor": 0.25, "max_position_embeddings": 64}
    assert read_rope(Fields(config, "config.json"), head_dim=32, partial=True).part == expected


def test_longrope_under_its_first_name() -> None:
    """Phi-3's files with 128k tokens of context called it "su" at first."""
    scaling = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    first, later = (
        read_rope(Fields(config | {"rope_scaling": scaling | {"type": name}}, "config.json"), head_dim=32)
        for name in ("su", "longrope")
    )
    assert first == later
    assert first.type == "longrope"
