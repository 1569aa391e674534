"""Small random checkpoints of every architecture, written by transformers, and the answers that it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Kimi_K25ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated
from transformers.utils import logging

from tests.model.cases import CASES, HYBRID
from tests.model.wrapped_configs import VOCAB, qwen3_5_config

NEW_TOKENS = 40
PROMPT_LENGTHS = (3, 17, 32, 49)
# If the two best logits of a draw are closer than this, rounding decides it. Such prompts are left out.
MIN_MARGIN = 1e-3

_ADD_ONE = ("gemma2", "gemma3", "gemma3-that-sees")  # cases whose norms add 1 to their weights
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # large enough for greedy continuations that do not repeat themselves
    "bos_token_id": None,
    "eos_token_id": None,
}
_DEMO_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
}
# Do not change their sizes: there is a factor for each pair of a head.
LONGROPE_CASES: dict[str, tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "phi3-within-the-trained-context": (
        Phi3ForCausalLM,
        Phi3Config,
        {"pad_token_id": None, "original_max_position_embeddings": 256, "rope_parameters": _LONGROPE},
    ),
    "phi3-beyond-the-trained-context": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 2,
            "rope_parameters": _LONGROPE | {"attention_factor": 1.2},
        },
    ),
}
# For the demo model's tokenizer.
DEMO_CASES: dict[str, tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "demo-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _DEMO_EXPERTS),
    "demo-hybrid": (
        Qwen3_5ForConditionalGeneration,
        qwen3_5_config(Qwen3_5Config),
        HYBRID | {"vocab_size": 4096, "max_position_embeddings": 4096},
    ),
}


@dataclass(frozen=True)
class Reference:
    """Greedy continuations that transformers computes, one prompt at a time, in float32 on the CPU."""

    prompts: list[list[int]]
    ids: list[list[int]]  # [prompt][new_tokens]
    logits: list[Tensor]  # [prompt] of [new_tokens, vocab]


def write_checkpoint(case: str, folder: Path, **sizes: object) -> PreTrainedModel:
    """Write the case's random model into a folder and return it. sizes: replace values of its configuration."""
    logging.disable_progress_bar()
    model_type, config_type, changes = (CASES | LONGROPE_CASES | DEMO_CASES)[case]
    torch.manual_seed(sum(case.encode()))
    settings = {**SHAPE, **changes, **sizes}
    model = model_type(config_type(**settings)).eval()
    if getattr(
        model.config, "attn_logit_softcapping", None
    ):  # some versions choose an attention that does not cap scores
        model.set_attn_implementation("eager")
    for module in model.modules():  # some versions of transformers always use 7.0
        if "swiglu_limit" in changes and hasattr(module, "limit"):
            module.limit = changes["swiglu_limit"]
        norm = getattr(module, "norm", None)  # some versions normalise all groups together
        if isinstance(norm, GraniteMoeHybridRMSNormGated) and not hasattr(norm, "group_size"):
            width = len(norm.weight)
            module.norm = Zamba2RMSNormGated(width, width // module.n_groups, norm.variance_epsilon)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases start as 0, norm weights as 1, or as 0 if 1 is added. These values would hide mistakes.
            if parameter.dim() == 1:
                adds_one = case in _ADD_ONE or not parameter.any()
                low = name.endswith("bias") or adds_one
                parameter.normal_(0.0 if low else 1.0, 0.25)
                if name.endswith(("mamba.A_log", "mixer.A_log")):  # else states would be forgotten at once
                    parameter.sub_(3.0)
            elif name.endswith("bias"):  # of experts
                parameter.normal_(0.0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.25)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.25)
    save(model, folder)
    return model


def save(model: PreTrainedModel, folder: Path, **options: str) -> None:
    """Save a model as its publisher does.

    transformers gives the layers of Kimi K2.5's language model the name of the tower's layers. It does not transpose
    the experts of Qwen3-VL. options: of `save_pretrained`, for other models.
    """
    if isinstance(model, Kimi_K25ForConditionalGeneration | Qwen3VLMoeForConditionalGeneration):
        options = {}
    model.save_pretrained(folder, **options)
    if isinstance(model, Kimi_K25ForConditionalGeneration):
        path = folder / "model.safetensors"
        wrong, right = "language_model.model.blocks.", "language_model.model.layers."
        save_file({name.replace(wrong, right): one for name, one in load_file(path).items()}, path, {"format": "pt"})
    if isinstance(model, Qwen3VLMoeForConditionalGeneration):
        transpose_experts(folder / "model.safetensors")


def transpose_experts(path: Path) -> None:
    """Swap the last two axes of all experts' matrices in a file."""
    tensors = load_file(path)
    turned = {name: one.mT.contiguous() for name, one in tensors.items() if ".experts." in name}
    save_file(tensors | turned, path, {"format": "pt"})


def reference(
    model: PreTrainedModel, vocab: int = VOCAB, per_length: int = 8, least: int = 20, new_tokens: int = NEW_TOKENS
) -> Reference:
    """Return greedy continuations of random prompts that rounding does not decide. Raises if too few remain."""
    generator = torch.Generator().manual_seed(1)
    prompts, ids, logits = [], [], []
    for length in PROMPT_LENGTHS:
        batch = torch.randint(0, vocab, (per_length, length), generator=generator)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        steps = torch.stack(out.logits, dim=1)  # [prompts, new_tokens, vocab]
        best = steps.topk(2, dim=-1).values
        for i, margin in enumerate((best[..., 0] - best[..., 1]).amin(dim=1).tolist()):
            if margin >= MIN_MARGIN:
                prompts.append(batch[i].tolist())
                ids.append(out.sequences[i, length:].tolist())
                logits.append(steps[i])
    if len(prompts) < least:
        raise RuntimeError(f"only {len(prompts)} prompts have a clear greedy continuation; change the seed")
    return Reference(prompts, ids, logits)
