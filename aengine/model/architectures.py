"""What differs between the architectures that the decoder can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table. "config" means: as `attention_bias` or `mlp_bias` in config.json says."""

    qk_norm: bool  # RMS norm of each q and k head before the rotation
    qkv_bias: Literal["always", "never", "config"]
    o_bias: Literal["never", "config"]
    mlp_bias: Literal["never", "config"]
    window: Literal["none", "all layers", "by layer"]  # how sliding_window is meant
    default_head_dim: int | None = None  # where config.json names none; None: hidden_size / heads


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        qk_norm=False, qkv_bias="config", o_bias="config", mlp_bias="config", window="none"
    ),
    "MistralForCausalLM": Architecture(
        qk_norm=False, qkv_bias="never", o_bias="never", mlp_bias="never", window="all layers"
    ),
    "Qwen2ForCausalLM": Architecture(
        qk_norm=False, qkv_bias="always", o_bias="never", mlp_bias="never", window="by layer"
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True, qkv_bias="config", o_bias="config", mlp_bias="never", window="by layer", default_head_dim=128
    ),
}
