"""InternLM 3 is a Llama with other names of biases, and a rotation that is only scaled beyond its positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.checkpoints import write_checkpoint
from tests.model.lora.adapters import assert_mixed, load

PUBLISHED = {
    "architectures": ["InternLM3ForCausalLM"],
    "model_type": "internlm3",
    "rope_theta": 5e7,
    "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
}


@pytest.mark.parametrize("bias", [False, True])
def test_a_published_file_gives_the_logits_of_a_llama(bias: bool, tmp_path: Path) -> None:
    biases = {"attention_bias": bias, "mlp_bias": bias}
    rope = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e7}
    model = write_checkpoint("llama-all-biases", tmp_path, **biases, rope_parameters=rope)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in (*biases, "rope_parameters"):
        del config[key]
    path.write_text(json.dumps(config | PUBLISHED | {"qkv_bias": bias, "bias": bias}))
    assert_mixed(load(tmp_path, ()), [model])
