"""The bytes that a decode step must read: weights as the checkpoint has them, once, and what the rows keep."""

from __future__ import annotations

import math
import re

import torch

from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.torch_kernels import TorchKernels
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.model.groups import Entry, entries_of, needed
from aengine.model.spec.attention import LatentSpec
from aengine.model.spec.feed_forward import ExpertsSpec

_PACKED = {"F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}  # bytes of an element; all others are of the model's dtype
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.")


def step_bytes(config: ModelConfig, rows: int, context: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> float:
    """Of a step that decodes one token of each of `rows` sequences of `context` tokens.

    Recurrent states are in float32. They are read and written.
    """
    kept = 0
    for attention in config.attending:
        latent = isinstance(attention, LatentSpec)
        numbers = attention.latent if latent else 2 * attention.keys
        kept += numbers * min(context, attention.window or context) * kv_dtype.itemsize
    if (states := config.state_shape(torch.float32, dtype)) is not None:
        kept += 2 * states.slot_bytes
    return weight_bytes(config, rows, dtype) + rows * kept


def weight_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype) -> float:
    """Return the bytes of all weights that a step reads: one embedding row a token, and only chosen experts."""
    entries = entries_of(Decoder(config, TorchKernels(), TorchAttention()).groups)
    total = 0.0
    for name in needed(entries):
        if name == "model.embed_tokens.weight" and not config.tie_word_embeddings:
            continue
        size = _size(entries[name], dtype)
        if (found := _EXPERT.match(name)) is not None:
            spec = config.layers[int(found[1])].ffn
            if isinstance(spec, ExpertsSpec):
                size *= expected_experts(spec.count, spec.router.top_k, tokens) / spec.count
        total += size
    return total


def expected_experts(count: int, top_k: int, tokens: int) -> float:
    """Return how many of `count` experts are chosen if each token chooses `top_k` by chance."""
    return count * (1 - (1 - top_k / count) ** tokens)


def _size(entry: Entry, dtype: torch.dtype) -> float:
    return math.prod(entry.shape) * _PACKED.get(entry.dtypes[0], dtype.itemsize)
