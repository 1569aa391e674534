"""Small random models that see, written by transformers, and what it computes from images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.model.cases import HYBRID

# Width and height: squares, both orientations, thin and small images, and sizes that no patch divides.
SIZES = ((64, 64), (200, 120), (120, 200), (33, 47), (301, 40), (20, 190), (3, 17), (640, 480))
_TEXT: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SIDE = 32  # of Gemma 3's images


@dataclass(frozen=True, slots=True)
class SeeingCase:
    """A model that sees: its classes and settings, and what its processor passes to it."""

    model: type[PreTrainedModel]
    config: Callable[..., Any]
    text: dict[str, object]
    vision: dict[str, object]
    outer: dict[str, object]
    processor: Any
    features: Callable[[Any, dict[str, Any]], tuple[Tensor, list[Tensor]]]


def _qwen(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    out = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    deep = [torch.cat(one) for one in getattr(out, "deepstack_features", None) or []]
    return torch.cat(out.pooler_output), deep


def _gemma3(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    return model.model.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1), []


def _gemma4(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    out = model.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
    return torch.cat(out.pooler_output), []


def _mistral3(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    return torch.cat(model.model.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output), []


_QWEN_VISION: dict[str, object] = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_heads": 3,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 49,
}
_QWEN_IDS: dict[str, object] = {
    "image_token_id": 120,
    "vision_start_token_id": 121,
    "vision_end_token_id": 122,
    "video_token_id": 123,
}
_GEMMA4_VISION: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 512,
}
_GEMMA4_TEXT: dict[str, object] = _TEXT | {
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 16,
    "pad_token_id": 0,
}
_GEMMA4_IDS: dict[str, object] = {
    "image_token_id": 120,
    "boi_token_id": 121,
    "eoi_token_id": 122,
    "audio_config": None,
    "tie_word_embeddings": False,
}
SEEING_CASES: dict[str, SeeingCase] = {
    "qwen3-5": SeeingCase(
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        _TEXT
        | HYBRID
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
            }
        },
        _QWEN_VISION,
        _QWEN_IDS,
        Qwen2VLImageProcessorPil(
            patch_size=4, size={"shortest_edge": 400, "longest_edge": 9000}, image_mean=[0.4, 0.5, 0.6]
        ),
        _qwen,
    ),
    "qwen3-vl": SeeingCase(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        _TEXT
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        _QWEN_VISION | {"depth": 3, "deepstack_visual_indexes": [2, 0]},
        _QWEN_IDS | {"tie_word_embeddings": False},
        Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}),
        _qwen,
    ),
    "qwen3-vl-moe": SeeingCase(
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        _TEXT
        | {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
        _QWEN_VISION | {"deepstack_visual_indexes": [1]},
        _QWEN_IDS | {"tie_word_embeddings": False},
        Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}),
        _qwen,
    ),
    "gemma3": SeeingCase(
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        _TEXT | {"head_dim": 16, "sliding_window": 16, "pad_token_id": 0},
        {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": _SIDE,
            "patch_size": 4,
        },
        {
            "mm_tokens_per_image": 16,
            "image_token_index": 120,
            "boi_token_index": 121,
            "eoi_token_index": 122,
            "tie_word_embeddings": False,
        },
        Gemma3ImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
        _gemma3,
    ),
    "gemma4": SeeingCase(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        _GEMMA4_TEXT,
        _GEMMA4_VISION | {"use_clipped_linears": True, "standardize": True},
        _GEMMA4_IDS,
        Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
        _gemma4,
    ),
    "gemma4-plain": SeeingCase(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        _GEMMA4_TEXT | {"use_bidirectional_attention": "vision"},
        _GEMMA4_VISION,
        _GEMMA4_IDS,
        Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=140),
        _gemma4,
    ),
    "mistral3": SeeingCase(
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        _TEXT | {"model_type": "mistral", "head_dim": 16, "rms_norm_eps": 1e-4},
        {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 96,
            "patch_size": 4,
            "hidden_act": "silu",
        },
        {"image_token_index": 120, "spatial_merge_size": 2, "multimodal_projector_bias": True},
        PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size=8),
        _mistral3,
    ),
}


def write_seeing(case: str, folder: Path, **text: object) -> Any:
    """Write a random model with the files of its image processor. Returns the model. text: changes its decoder."""
    spec = SEEING_CASES[case]
    torch.manual_seed(7)
    model: Any = spec.model(spec.config(text_config=spec.text | text, vision_config=spec.vision, **spec.outer)).eval()
    with torch.no_grad():
        for name, one in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("_max"):
                one.fill_(1.5)
            elif name.endswith("_min"):
                one.fill_(-1.0)
            elif "inv_freq" in name or not one.is_floating_point() or name.endswith(("embed_scale", "layer_scalar")):
                continue
            elif one.dim() > 1:
                one.normal_(0.0, one.shape[-1] ** -0.5)
            else:
                one.normal_(1.0 if name.endswith("weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    spec.processor.save_pretrained(folder)
    return model


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of noise with a gradient, so that every pixel counts."""
    rng = np.random.default_rng((seed, width, height))
    ramp = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 55, height)[:, None, None]
    noise = rng.integers(0, 120, (height, width, 3))
    return Image.fromarray(((ramp + noise) % 256).astype(np.uint8))


def processed(case: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """Return what transformers' processor passes to the model."""
    inputs: dict[str, Any] = dict(SEEING_CASES[case].processor(list(images), return_tensors="pt"))
    return inputs


def resized(image: Image.Image, width: int, height: int, resample: int) -> NDArray[np.uint8]:
    return np.asarray(image.resize((width, height), resample))


def change_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **changes}))
