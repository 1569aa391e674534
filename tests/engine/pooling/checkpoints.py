"""Small random checkpoints that embed, classify or score, the demo model's tokenizer, and transformers' results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)
from transformers.utils import logging

from aengine.model.loading.hub import DEMO

HIDDEN = 64
VOCAB = 4096
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FAMILIES: dict[str, tuple[Any, Any, Any, Any, dict[str, object]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, Qwen3Model, Qwen3ForSequenceClassification, {"head_dim": 32}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2Model, Qwen2ForSequenceClassification, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaForSequenceClassification, {}),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        MistralModel,
        MistralForSequenceClassification,
        {"sliding_window": 20},
    ),
}
FAMILIES = tuple(_FAMILIES)
HEADS = ("vocabulary", "none", "classes")


def write(folder: Path, family: str = "qwen3", head: str = "none", **changes: object) -> PreTrainedModel:
    """Write a random checkpoint and return its model. changes: of its configuration."""
    logging.disable_progress_bar()
    config_type, causal, base, classifier, shape = _FAMILIES[family]
    torch.manual_seed(sum(f"{family} {head}".encode()))
    kind = {"vocabulary": causal, "none": base, "classes": classifier}[head]
    model: PreTrainedModel = kind(config_type(**{**_SHAPE, **shape, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases of 0 and norm weights of 1 would hide a mistake
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.25)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return model


def write_modules(folder: Path, *modules: str, **pooling: object) -> None:
    """Describe the checkpoint as sentence-transformers does. pooling: its pooling module's configuration."""
    entries = []
    for index, module in enumerate(("Transformer", *modules)):
        path = f"{index}_{module}" if index else ""
        entries.append(
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
        )
        if path:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(pooling if module == "Pooling" else {}))
    (folder / "modules.json").write_text(json.dumps(entries))


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return [tokens, hidden] after the last norm."""
    found: Tensor = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    return found


@torch.inference_mode()
def logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return [labels] of a classifier, or [tokens, vocab] of a language model."""
    found: Tensor = model(torch.tensor([ids])).logits[0]
    return found
