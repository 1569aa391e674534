"""The memory for recurrent states is sized with the drafts of the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.errors import ConfigError
from aengine.model.config import ModelConfig
from aengine.runtime.startup.sizing.pool import size_pool
from aengine.runtime.startup.sizing.states import states_of_rows

# The linear layers are those of Qwen3.5-9B.
QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 12288,
    "vocab_size": 248320,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
MIB = 2**20


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return ModelConfig.from_folder(tmp_path)


def config(**knobs: object) -> EngineConfig:
    return configure(EngineConfig, {}, **knobs)


def test_drafts_take_a_fraction_of_a_state(model: ModelConfig) -> None:
    """A slot for each draft would take 149 MiB more."""
    plain, drafting = (states_of_rows(config(), model, torch.bfloat16, drafts) for drafts in (0, 3))
    assert plain is not None
    assert drafting is not None
    assert plain.bytes_of_row == pytest.approx(49.5 * MIB)
    assert drafting.bytes_of_row == pytest.approx(56.1 * MIB, rel=1e-3)


def test_the_drafts_of_all_rows_must_fit_into_the_memory(model: ModelConfig) -> None:
    asked = config(max_num_seqs=64, state_snapshots=0, num_pages=1000)
    memory = int(3.2 * 2**30) + 1000 * model.kv_shape(16, torch.bfloat16).page_bytes
    pool = size_pool(asked, model, torch.bfloat16, 0, memory, torch.bfloat16)
    assert pool.states is not None
    assert pool.states.row_bytes == 65 * pool.states.bytes_of_row
    with pytest.raises(ConfigError, match=r"the states of 64 rows take 3\.6 GiB"):
        size_pool(asked, model, torch.bfloat16, 0, memory, torch.bfloat16, most_drafts=3)
