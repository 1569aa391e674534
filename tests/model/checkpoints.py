"""Small random checkpoints of every supported architecture, written by transformers, and what it makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

VOCAB = 128
NEW_TOKENS = 64
PROMPT_LENGTHS = (3, 17, 32, 49)
# A draw whose two best logits are closer than this is decided by rounding: such prompts prove nothing.
MIN_MARGIN = 1e-3

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # large enough for greedy continuations that wander
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_DEMO_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, object]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias-untied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "rope_parameters": _YARN}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-window-upper-layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "llama2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-all-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 20}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5}),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen2-moe-some-layers": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        _EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-first-dense": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _EXPERTS | {"mlp_only_layers": [0]}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}),
}
# For the demo model's tokenizer.
DEMO_CASES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, object]]] = {
    "demo-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _DEMO_EXPERTS)
}


@dataclass(frozen=True)
class Reference:
    """Greedy continuations by transformers, alone in float32 on the CPU."""

    prompts: list[list[int]]
    ids: list[list[int]]  # [prompt][NEW_TOKENS]
    logits: list[Tensor]  # [prompt] of [NEW_TOKENS, vocab]


def write_checkpoint(case: str, folder: Path, **sizes: object) -> PreTrainedModel:
    """Write the case's random model into `folder` and return it. sizes: in place of those in its configuration."""
    logging.disable_progress_bar()
    model_type, config_type, changes = (CASES | DEMO_CASES)[case]
    torch.manual_seed(sum(case.encode()))
    model = model_type(config_type(**{**_SHAPE, **changes, **sizes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases start as 0 and norm weights as 1: both would hide a mistake.
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.25)
    model.save_pretrained(folder)
    return model


def reference(model: PreTrainedModel, vocab: int = VOCAB, per_length: int = 8) -> Reference:
    """Greedy continuations of random prompts, without those that rounding decides. Raises unless 20 are left."""
    generator = torch.Generator().manual_seed(1)
    prompts, ids, logits = [], [], []
    for length in PROMPT_LENGTHS:
        batch = torch.randint(0, vocab, (per_length, length), generator=generator)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        steps = torch.stack(out.logits, dim=1)  # [prompts, NEW_TOKENS, vocab]
        best = steps.topk(2, dim=-1).values
        for i, margin in enumerate((best[..., 0] - best[..., 1]).amin(dim=1).tolist()):
            if margin >= MIN_MARGIN:
                prompts.append(batch[i].tolist())
                ids.append(out.sequences[i, length:].tolist())
                logits.append(steps[i])
    if len(prompts) < 20:
        raise RuntimeError(f"only {len(prompts)} prompts have a clear greedy continuation; change the seed")
    return Reference(prompts, ids, logits)
