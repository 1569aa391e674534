"""Checkpoints without weights: the config.json of a shape, for `load_format="dummy"`."""

from __future__ import annotations

import json
import random
from pathlib import Path

SHAPES = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
}
SMALL = {
    "30m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536}
    | {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "eos_token_id": 4095},
}


def write_config(folder: Path, shape: str, context: int = 40960) -> None:
    """A Qwen3 config.json of that shape."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": context,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape != "8b",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 151645,
        **(SHAPES | SMALL)[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))


def ids(rng: random.Random, count: int) -> list[int]:
    """A prompt."""
    return [rng.randint(0, 10000) for _ in range(count)]
