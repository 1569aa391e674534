"""One small file for each family of models: config.json -> the layers of its decoder."""

from __future__ import annotations

from collections.abc import Callable

from aengine.model.families import llama, mistral, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec

# By the name in `architectures`.
FAMILIES: dict[str, Callable[[Fields], list[LayerSpec]]] = {
    "LlamaForCausalLM": llama.layers,
    "MistralForCausalLM": mistral.layers,
    "Qwen2ForCausalLM": qwen2.layers,
    "Qwen3ForCausalLM": qwen3.layers,
    "MixtralForCausalLM": mixtral.layers,
    "Qwen2MoeForCausalLM": qwen2_moe.layers,
    "Qwen3MoeForCausalLM": qwen3_moe.layers,
    "OlmoeForCausalLM": olmoe.layers,
}
