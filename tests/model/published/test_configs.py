"""Published config.json files, at reduced sizes, give the same results as in transformers.

configs.json has the fields of published files by repository, with their sources: mlc-llm's model presets, the
checkpoint conversions of maxtext and Megatron-Bridge, aiconfigurator, tests of TensorRT-LLM and others. Some are from
memory. Fields that nothing reads are kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from aengine.errors import UnsupportedModelError
from aengine.model.config import ModelConfig
from aengine.model.spec.feed_forward import MLPSpec
from tests.model.checkpoints import save
from tests.model.loading_one import load_model
from tests.model.unusual_cases import TextOfLlama4

from ..harness import Harness, Running
from .reduced import CONFIGS, TEXT, reduced

NEW_TOKENS = 4
# transformers' names of these models, and of the classes that compute them
_REMOTE = {"kimi_k2": "deepseek_v3", "internlm3": "llama", "mimo": "qwen2"}
_CLASSES = {
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
_TEMPERATURE = "attn_temperature_tuning"  # Llama 4 has a number in some files, which newer transformers refuse
_TIES = "tie_word_embeddings"


@pytest.mark.slow
@pytest.mark.parametrize("repository", CONFIGS)
def test_it_is_computed_as_transformers_does(repository: str, tmp_path: Path) -> None:
    config = reduced(CONFIGS[repository]["config"])
    config.pop("quantization_config", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_for_transformers(config)))
    torch.manual_seed(len(repository))
    architecture = config["architectures"][0]
    model_type = getattr(transformers, _CLASSES.get(architecture, architecture))
    if architecture == TextOfLlama4.__name__:
        model_type = TextOfLlama4
    model = model_type(AutoConfig.from_pretrained(tmp_path)).eval()
    save(model, tmp_path, max_shard_size="400KB")
    path.write_text(json.dumps(config))
    decoder = load_model(tmp_path, ModelConfig.from_folder(tmp_path), max_positions=256)
    prompts = [torch.randint(0, TEXT, (length,)).tolist() for length in (3, 41)]
    for one in Harness(decoder, page_size=16).run([Running(prompt) for prompt in prompts], NEW_TOKENS, chunk=17):
        with torch.no_grad():
            expected = model(torch.tensor([one.tokens[:-1]])).logits[0, -NEW_TOKENS:]
        assert expected.std() > 0.01
        torch.testing.assert_close(torch.stack(one.logits), expected, atol=2e-4, rtol=1e-3)


# Settings that only the publisher's code reads.
_OTHERS = {
    "MiniMaxAI/MiniMax-M2": {"scoring_func": "softmax", "qk_norm_type": "per_head", "shared_intermediate_size": 1536},
    "tencent/Hy3-preview": {"route_norm": False, "moe_router_use_sigmoid": False, "qk_norm": False},
    "swiss-ai/Apertus-8B-Instruct-2509": {"post_norm": True},
    "CohereLabs/c4ai-command-a-03-2025": {"rotary_pct": 0.5, "use_parallel_block": False},
    "bigcode/starcoder2-7b": {"norm_type": "rms_norm"},
    "tiiuae/Falcon-H1-7B-Instruct": {"mamba_use_mlp": False},
}


@pytest.mark.parametrize(("repository", "key"), [(name, key) for name, others in _OTHERS.items() for key in others])
def test_settings_that_transformers_does_not_read_are_refused_if_they_differ(
    repository: str, key: str, tmp_path: Path
) -> None:
    config = CONFIGS[repository]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {key: _OTHERS[repository][key]}))
    with pytest.raises(UnsupportedModelError, match=f"{key} .* is not supported, only"):
        ModelConfig.from_folder(tmp_path)


def test_the_first_layers_of_hy3_are_dense(tmp_path: Path) -> None:
    config = CONFIGS["tencent/Hy3-preview"]["config"] | {"first_k_dense_replace": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = ModelConfig.from_folder(tmp_path).layers
    assert [isinstance(layer.ffn, MLPSpec) for layer in layers[:5]] == [True] * 3 + [False] * 2


def _for_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Return transformers' configuration of the same model in float32."""
    parts = {key: _for_transformers(value) for key, value in config.items() if key in ("text_config", "vision_config")}
    changed = config | parts | {"dtype": "float32"}
    if config.get("model_type") in _REMOTE:
        changed["model_type"] = _REMOTE[config["model_type"]]
    changed.pop("torch_dtype", None)
    if _TEMPERATURE in config:
        changed[_TEMPERATURE] = bool(config[_TEMPERATURE])
    if (
        config.get("model_type") == "mistral3" and _TIES not in config
    ):  # transformers would tie the embeddings; the files do not
        changed[_TIES] = config["text_config"].get(_TIES, False)
    return changed
